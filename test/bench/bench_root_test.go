// SPDX-License-Identifier: Apache-2.0

//go:build linux && root

package main

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/test/kit/program"
)

// elsewhere needs what is not installed for these tests: engines, another kernel.
var elsewhere = []string{"flows", "engine", "kube", "emulated", "vsock"}

func TestBenchmarkMeasuresEveryPartAndReports(t *testing.T) {
	dir := t.TempDir()
	json := filepath.Join(dir, "results.jsonl")
	var log bytes.Buffer
	var only []string
	for _, p := range parts() {
		if !slices.Contains(elsewhere, p.Name) {
			only = append(only, p.Name)
		}
	}
	err := run(t.Context(), []string{"-tiny", "-only", strings.Join(only, ","), "-json", json, "-report", dir}, &log, &log)
	if err := beyondLosses(err); err != nil {
		t.Fatalf("%v\n%s", err, log.String())
	}
	readme, err := os.ReadFile(filepath.Join(dir, "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range parts() {
		if has := strings.Contains(string(readme), "\n## "+p.Title+"\n"); has == slices.Contains(elsewhere, p.Name) {
			t.Errorf("the report has section %q: %v", p.Title, has)
		}
	}
	again := t.TempDir()
	if err := beyondLosses(run(t.Context(), []string{"-render", json, "-report", again}, &log, &log)); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(filepath.Join(again, "README.md")); err != nil || !bytes.Equal(b, readme) {
		t.Errorf("the report of the lines differs from the run's: %v", err)
	}
}

func TestAModeThatDidNotRunIsFoundOut(t *testing.T) {
	dir, err := os.MkdirTemp("", "flb")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	binary, err := program.Path(dir)
	if err != nil {
		t.Fatal(err)
	}
	// It claims to observe by events, and polls.
	g, err := newGuest(binary, dir, mode{name: modeBPF, flags: modes[1].flags})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(g.close)
	said := func(want string, f func(context.Context) error) {
		t.Helper()
		var err error
		for range 600 {
			if err = f(t.Context()); err != nil && strings.Contains(err.Error(), want) {
				return
			}
			time.Sleep(100 * time.Millisecond)
		}
		t.Errorf("the error is %v, want %q", err, want)
	}
	said("did not really run", g.check)
	if err := g.agent.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	said("has ended", g.check)
}

func TestAnAgentThatDoesNotRunFailsTheRunAndNamesTheCells(t *testing.T) {
	t.Setenv(program.Variable, "/bin/false")
	var out, log bytes.Buffer
	err := run(t.Context(), []string{"-tiny", "-only", "missed"}, &out, &log)
	if err == nil || !strings.Contains(err.Error(), "missed: "+missedMeasure+", 1 ms alive, bpf: the agent has ended") {
		t.Errorf("the error is %v", err)
	}
}

func TestUnknownPartsAreRefused(t *testing.T) {
	var out bytes.Buffer
	if err := run(t.Context(), []string{"-only", "latency,nonsense"}, &out, &out); err == nil || !strings.Contains(err.Error(), "nonsense") {
		t.Errorf("error %v", err)
	}
	if err := run(t.Context(), []string{"-render", "/dev/null"}, &out, &out); err == nil {
		t.Error("a file without results makes a report")
	}
}
