// SPDX-License-Identifier: Apache-2.0

//go:build linux && root

package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/test/kit/program"
)

// elsewhere needs engines or another kernel.
var elsewhere = []string{"engine", "kube", "vsock"}

// notTiny is what the tiny scale leaves out.
func notTiny(mode string) bool {
	return mode == wayGvproxy
}

func TestEveryMeasureIsInTheReport(t *testing.T) {
	var chosen []part
	for _, p := range parts() {
		if !slices.Contains(elsewhere, p.name) {
			chosen = append(chosen, p)
		}
	}
	var log, out bytes.Buffer
	dir := t.TempDir()
	if err := run(t.Context(), []string{"-scale", "tiny", "-only", strings.Join(names(chosen), ","), "-json", dir + "/results", "-report", dir}, &out, &log); err != nil {
		t.Fatalf("%v\n%s", err, log.String())
	}
	res, err := readFile(dir + "/results")
	if err != nil {
		t.Fatal(err)
	}
	report, err := os.ReadFile(dir + "/README.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range chosen {
		for _, m := range p.measures {
			for _, mode := range m.modes {
				if _, ok := res.find(m.name, mode, m.eachSize()[0]); !ok && !notTiny(mode) {
					t.Errorf("no result of %q in mode %q", m.name, mode)
				}
			}
			if !strings.Contains(string(report), "**"+m.name+"**") {
				t.Errorf("no table of %q", m.name)
			}
		}
	}
}

func TestFailedPartsAreReported(t *testing.T) {
	t.Setenv(program.Variable, "/bin/false")
	var out, log bytes.Buffer
	err := run(t.Context(), []string{"-scale", "tiny", "-only", "missed"}, &out, &log)
	if err == nil || !strings.Contains(err.Error(), "missed: bpf: ") || !strings.Contains(err.Error(), "the agent has ended") {
		t.Errorf("error %v", err)
	}
	if !strings.Contains(out.String(), "* missed: ") {
		t.Errorf("the report does not say so:\n%s", out.String())
	}
}

func TestModeThatDidNotRunIsAnError(t *testing.T) {
	b, err := newBench(tiny, io.Discard, t.Output(), nil)
	if err != nil {
		t.Fatal(err)
	}
	b.methods = map[string]string{}
	var g *guest
	if err := attempt(func() {
		g = b.newGuest(mode{name: modeBPF, flags: modes[1].flags}, nil) // it polls
		g.start()
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(g.close)
	err = eventually(t.Context(), func() error {
		if err := attempt(func() { g.check(t.Context()) }); err == nil || !strings.Contains(err.Error(), "is not mode") {
			return fmt.Errorf("error %w", err)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}
