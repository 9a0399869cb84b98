// SPDX-License-Identifier: Apache-2.0

package report

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestReporter(t *testing.T) {
	for _, tt := range []struct {
		name   string
		events string
		want   Count
		show   []string
		hide   []string
	}{{
		name: "pass",
		events: `{"Action":"start","Package":"p"}
{"Action":"run","Package":"p","Test":"TestA"}
{"Action":"output","Package":"p","Test":"TestA","Output":"chatter\n"}
{"Action":"pass","Package":"p","Test":"TestA","Elapsed":0.01}
{"Action":"output","Package":"p","Output":"PASS\n"}
{"Action":"pass","Package":"p","Elapsed":0.02}`,
		want: Count{Passed: 1},
		show: []string{"ok   p: 1 passed, 0 failed"},
		hide: []string{"chatter", "PASS"},
	}, {
		name: "failed subtest is counted and shown once, with its test",
		events: `{"Action":"run","Package":"p","Test":"TestA"}
{"Action":"run","Package":"p","Test":"TestA/x"}
{"Action":"output","Package":"p","Test":"TestA/x","Output":"broken\n"}
{"Action":"fail","Package":"p","Test":"TestA/x"}
{"Action":"fail","Package":"p","Test":"TestA"}
{"Action":"fail","Package":"p"}`,
		want: Count{Failed: 1},
		show: []string{"broken\n", "FAIL p TestA", "FAIL p: 0 passed, 1 failed"},
	}, {
		name: "skipped test",
		events: `{"Action":"output","Package":"p","Test":"TestA","Output":"no root\n"}
{"Action":"skip","Package":"p","Test":"TestA"}
{"Action":"pass","Package":"p"}`,
		want: Count{Failed: 1},
		show: []string{"no root\n", "TestA", "skipped"},
	}, {
		name: "skipped subtest of a passed test",
		events: `{"Action":"skip","Package":"p","Test":"TestA/x"}
{"Action":"pass","Package":"p","Test":"TestA"}
{"Action":"pass","Package":"p"}`,
		want: Count{Failed: 1},
		show: []string{"skipped"},
	}, {
		name: "package without tests",
		events: `{"Action":"output","Package":"p","Output":"? p [no test files]\n"}
{"Action":"skip","Package":"p"}`,
		hide: []string{"no test files"},
	}, {
		name: "build failure",
		events: `{"ImportPath":"p","Action":"build-output","Output":"p.go:1: undefined: x\n"}
{"ImportPath":"p","Action":"build-fail"}
{"Action":"start","Package":"p"}
{"Action":"output","Package":"p","Output":"FAIL p [build failed]\n"}
{"Action":"fail","Package":"p","FailedBuild":"p"}`,
		want: Count{Failed: 1},
		show: []string{"undefined: x", "build failed"},
	}, {
		name: "crash during a test",
		events: `{"Action":"run","Package":"p","Test":"TestA"}
{"Action":"output","Package":"p","Test":"TestA","Output":"SIGSEGV\n"}
{"Action":"fail","Package":"p"}`,
		want: Count{Failed: 1},
		show: []string{"SIGSEGV"},
	}, {
		name:   "stream ends too early",
		events: `{"Action":"output","Package":"p","Test":"TestA","Output":"last words\n"}`,
		want:   Count{Failed: 1},
		show:   []string{"last words", "FAIL p"},
	}, {
		name:   "plain text",
		events: `go: cannot find main module`,
		show:   []string{"go: cannot find main module"},
	}} {
		t.Run(tt.name, func(t *testing.T) {
			var out bytes.Buffer
			r := Reporter{Out: &out, Prefix: "> "}
			if err := r.Read(strings.NewReader(tt.events)); err != nil {
				t.Fatal(err)
			}
			r.End()
			if got := r.Count(); got != tt.want {
				t.Errorf("counted %v, want %v", got, tt.want)
			}
			for _, s := range tt.show {
				if strings.Count(out.String(), s) != 1 {
					t.Errorf("want %q once", s)
				}
			}
			for _, s := range tt.hide {
				if strings.Contains(out.String(), s) {
					t.Errorf("want no %q", s)
				}
			}
			for line := range strings.Lines(out.String()) {
				if !strings.HasPrefix(line, "> ") {
					t.Errorf("line %q has no prefix", line)
				}
			}
			if t.Failed() {
				t.Log(out.String())
			}
		})
	}
}

func TestCheck(t *testing.T) {
	var out bytes.Buffer
	r := Reporter{Out: &out}
	r.Check("good", nil)
	r.Check("bad", errors.New("reason"))
	if got, want := r.Count(), (Count{Passed: 1, Failed: 1}); got != want {
		t.Errorf("counted %v, want %v", got, want)
	}
	if got, want := out.String(), "ok   good\nFAIL bad: reason\n"; got != want {
		t.Errorf("showed %q, want %q", got, want)
	}
}

func TestTally(t *testing.T) {
	file := filepath.Join(t.TempDir(), "tally")
	unit := Reporter{Out: io.Discard}
	unit.Check("a", nil)
	root := Reporter{Out: io.Discard, Prefix: "[6.1] "}
	root.Check("b", nil)
	root.Check("c", errors.New("no\nkernel"))
	long := `{"Action":"output","Package":"p","Test":"TestLong","Output":"begin\n` + strings.Repeat(`x\n`, 1000) + `end\n"}`
	if err := root.Read(strings.NewReader(long + "\n" + `{"Action":"fail","Package":"p","Test":"TestLong"}` + "\n" + `{"Action":"fail","Package":"p"}`)); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(unit.Append(file, "unit"), root.Append(file, "root")); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var out bytes.Buffer
	sum, err := Sum(&out, f)
	if err != nil || sum.String() != "2 passed, 2 failed" {
		t.Errorf("sum %q, error %v", sum, err)
	}
	for _, want := range []string{
		"unit                 1 passed, 0 failed\nroot                 1 passed, 2 failed\n",
		"root| FAIL [6.1] p TestLong\nroot| begin\n", "root| ... 972 lines\n",
		"root| end\nFAIL root: [6.1] c: no kernel\nFAIL root: [6.1] p TestLong\n",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("want %q in %q", want, out.String())
		}
	}
	if err := unit.Append("", "unit"); err != nil {
		t.Errorf("no tally: %v", err)
	}
	if _, err := Sum(&out, strings.NewReader("1 x unit\n")); err == nil {
		t.Error("a broken tally has no error")
	}
}
