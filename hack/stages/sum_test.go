// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestSum(t *testing.T) {
	const (
		pass = `{"Action":"pass","Package":"p","Test":"A"}` + "\n" + `{"Action":"pass","Package":"p"}` + "\n"
		fail = `{"Action":"output","Package":"q","Test":"B","Output":"why\n"}` + "\n" +
			`{"Action":"fail","Package":"q","Test":"B"}` + "\n" + `{"Action":"fail","Package":"q"}` + "\n"
	)
	ran := outcome{ran: true, took: 7 * time.Second}
	broken := outcome{ran: true, err: errors.New("exit status 2")}
	for _, tt := range []struct {
		name    string
		files   map[string]string
		outcome outcome
		failed  int
		want    []string // lines, the last one being the last
	}{
		{"pass", map[string]string{"one.json": pass}, ran, 0, []string{"(7 s)", "1 passed, 0 failed"}},
		{"parts", map[string]string{"one.a.json": pass, "one.b.json": pass}, ran, 0, []string{"2 passed, 0 failed"}},
		{"another stage's", map[string]string{"one.json": pass, "one-more.json": fail}, ran, 0, []string{"1 passed, 0 failed"}},
		{"fail", map[string]string{"one.json": pass + fail}, broken, 1, []string{"one| why", "FAIL one: q B", "1 passed, 1 failed"}},
		{"broken stage", nil, broken, 1, []string{"FAIL one: stage: exit status 2", "0 passed, 1 failed"}},
		{"stage without a test", map[string]string{"one.json": ""}, ran, 1, []string{"ran no test", "0 passed, 1 failed"}},
		{"stage that did not run", nil, outcome{}, 1, []string{"did not run", "0 passed, 1 failed"}},
		{"no event", map[string]string{"one.json": "hello\n"}, ran, 1, []string{"is no test event", "0 passed, 1 failed"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			for name, text := range tt.files {
				if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			var out strings.Builder
			if failed := sum(&out, dir, []string{"one"}, map[string]outcome{"one": tt.outcome}); failed != tt.failed {
				t.Errorf("%d failed, want %d", failed, tt.failed)
			}
			for _, want := range tt.want {
				if !strings.Contains(out.String(), want) {
					t.Errorf("no %q in\n%s", want, out.String())
				}
			}
			if last := tt.want[len(tt.want)-1] + "\n"; !strings.HasSuffix(out.String(), "\n"+last) {
				t.Errorf("%q is not the last line of\n%s", last, out.String())
			}
		})
	}
}
