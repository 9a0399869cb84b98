// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/test/report"
)

func TestStage(t *testing.T) {
	const pass = `{"Action":"pass","Package":"p","Test":"TestA"}{"Action":"pass","Package":"p"}`
	for _, tt := range []struct {
		name   string
		events bool
		script string
		want   report.Count
		show   string
	}{
		{"check passes", false, "echo hello", report.Count{Passed: 1}, "hello\nok   check passes"},
		{"check fails", false, "exit 3", report.Count{Failed: 1}, "FAIL check fails"},
		{"tests pass", true, "echo '" + strings.ReplaceAll(pass, "}{", "}\n{") + "'", report.Count{Passed: 1}, "tests pass: 1 passed, 0 failed"},
		{"command fails though no test did", true, "echo go: no module; exit 1", report.Count{Failed: 1}, "go: no module\n"},
		{"command dies", true, `echo '{"Action":"run","Package":"p","Test":"TestA"}'; kill -9 $$`, report.Count{Failed: 1}, "FAIL p"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var out bytes.Buffer
			r := &report.Reporter{Out: &out}
			err := stage(t.Context(), r, tt.events, tt.name, []string{"sh", "-c", tt.script})
			got := r.Count()
			if err != nil || got != tt.want || !strings.Contains(out.String(), tt.show) {
				t.Errorf("counted %v, error %v, want %v and %q in %q", got, err, tt.want, tt.show, out.String())
			}
		})
	}
}

func TestSumEndsWithTheTotal(t *testing.T) {
	file := filepath.Join(t.TempDir(), "tally")
	if err := os.WriteFile(file, []byte("3 0 test-unit\n1 2 test-vm-6.1\n\tTestA\n\t\twhy\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if _, err := sum(&out, file); err != nil {
		t.Fatal(err)
	}
	if !strings.HasSuffix(out.String(), "\ntest-vm-6.1| FAIL TestA\ntest-vm-6.1| why\nFAIL test-vm-6.1: TestA\n4 passed, 2 failed\n") {
		t.Errorf("got %q", out.String())
	}
	if _, err := sum(&out, file+"-absent"); err == nil {
		t.Error("an absent tally has no error")
	}
}
