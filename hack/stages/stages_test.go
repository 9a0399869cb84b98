// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// Each group has known stages, and each part a name of its own and packages and scripts that exist.
func TestStages(t *testing.T) {
	t.Chdir("../..")
	known := make(map[string]bool)
	for _, s := range stages() {
		if known[s.name] || s.about == "" {
			t.Errorf("stage %s is there twice, or says nothing about itself", s.name)
		}
		known[s.name] = true
		parts := make(map[string]bool)
		for _, p := range s.parts() {
			if parts[p.name] || p.name == "" && len(s.parts()) > 1 {
				t.Errorf("%s: part %q has no name of its own", s.name, p.name)
			}
			parts[p.name] = true
			checkFiles(t, s.name, p)
		}
		for _, c := range s.needs {
			checkFiles(t, s.name, part{args: strings.Fields(c)})
		}
	}
	for name, g := range groups() {
		for _, stage := range slices.Concat(g.lanes...) {
			if !known[stage] {
				t.Errorf("group %s: no stage %s", name, stage)
			}
		}
	}
}

// checkFiles checks that scripts and packages of a command exist, and that it has some packages.
func checkFiles(t *testing.T, stage string, p part) {
	dir, packages := ".", 0
	for i, arg := range p.args {
		if i > 0 && p.args[i-1] == "-C" && p.args[0] != "bash" {
			dir = arg
		}
		if strings.HasPrefix(arg, "hack/") && i == 0 {
			if _, err := os.Stat(arg); err != nil {
				t.Errorf("%s: %v", stage, err)
			}
		}
		if !strings.HasPrefix(arg, "./") {
			continue
		}
		packages++
		at := filepath.Join(dir, strings.TrimSuffix(arg, "..."))
		if slices.Contains(p.args, "./vm") && arg != "./vm" {
			at = strings.TrimSuffix(arg, "...") // the rig's packages are those of the repository
		}
		if _, err := os.Stat(at); err != nil {
			t.Errorf("%s: %v", stage, err)
		}
	}
	if p.events && packages == 0 {
		t.Errorf("%s: no package in %v", stage, p)
	}
}

// A stage runs to its end also after a part that failed, and its results are kept.
func TestStageThatFails(t *testing.T) {
	var out strings.Builder
	r := &runner{ctx: t.Context(), out: &out, results: t.TempDir()}
	s := stage{name: "one", parts: func() []part {
		return []part{
			check("bad", "sh", "-c", "echo why; exit 3"), check("good", "sh", "-c", "echo 'note: noted'; echo quiet"),
		}
	}}
	for range 2 { // the second run forgets the results of the first
		if o := r.stage(s); !o.ran || o.err == nil {
			t.Errorf("%+v", o)
		}
	}
	if text := out.String(); strings.Count(text, "why\n") != 2 || !strings.Contains(text, "note: noted\n") || strings.Contains(text, "quiet") {
		t.Errorf("shown:\n%s", text)
	}
	out.Reset()
	if failed := sum(&out, r.results, []string{"one"}, map[string]outcome{"one": {ran: true, err: os.ErrInvalid}}); failed != 1 {
		t.Errorf("%d failures in\n%s", failed, out.String())
	}
	if log, err := os.ReadFile(filepath.Join(r.results, "one.good.log")); err != nil || !strings.Contains(string(log), "quiet") {
		t.Errorf("log %q, %v", log, err)
	}
}
