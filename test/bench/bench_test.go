// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"bytes"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "-relay" { // a relay of the part flows
		main()
		return
	}
	m.Run()
}

func TestSummarize(t *testing.T) {
	var samples []float64
	for i := range 201 {
		samples = append(samples, float64(201-i))
	}
	if d := summarize(samples); d.N != 201 || d.Value != 101 || d.Max != 201 || d.Margin < 5 || d.Margin > 20 {
		t.Errorf("got %+v", d)
	}
	if d := summarize(samples[:2]); d.Margin != 0 {
		t.Errorf("two samples have a margin of %v", d.Margin)
	}
}

func TestValueHasUnit(t *testing.T) {
	got := []string{
		value(214e-6, "s"), value(-0.0456, "s"), value(0, "s"), value(18.34e6, "B"), value(0.00178, "%"), number(999.7),
		ratio(3036, 1), ratio(1, 4), ratio(1, 0),
	}
	want := []string{"214 µs", "-45.6 ms", "0.00 s", "18.3 MB", "0.00178 %", "1,000", "3,036×", "0.25×", "–"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestTargetsAreJudged(t *testing.T) {
	r := &results{cells: []cell{
		{Measure: "a", Mode: "x", Unit: "s", dist: dist{Value: 2}}, {Measure: "a", Mode: "y", Unit: "s", dist: dist{Value: 1}},
	}}
	x, y := of("a", "x", 0), of("a", "y", 0)
	got := r.verdict([]target{
		{key: "met", what: "met", ref: y, limit: 1, unit: "s"},
		{key: "missed", what: "missed", ref: x, limit: 1, unit: "s"},
		{key: "ratio", what: "ratio", ref: x, over: &y, limit: 3, unit: "×", atLeast: true},
		{key: "more", what: "more", ref: x, minus: &y, limit: 1, unit: "s"},
		{key: "p99", what: "p99", ref: x.at99(), limit: 1, unit: "s"},
	}, parseReasons("Preamble.\n\n## missed\n\nIt is\nfar away.\n\n## met\n\nNever shown.\n"))
	want := [][]string{
		{"met", "≤ 1.00 s", "1.00 s", "yes"}, {"missed", "≤ 1.00 s", "2.00 s", "**no** (1)"}, {"ratio", "≥ 3 ×", "2 ×", "**no** (2)"},
		{"more", "≤ 1.00 s", "1.00 s", "yes"}, {"p99", "≤ 1.00 s", "–", "not measured"},
	}
	if diff := cmp.Diff(want, got.Rows) + cmp.Diff([]string{"It is far away.", "Not known yet."}, got.Reasons); diff != "" {
		t.Error(diff)
	}
}

func TestEveryTargetIsMeasured(t *testing.T) {
	var known []sampleKey
	for _, m := range measures() {
		known = append(known, m.keys()...)
	}
	why := parseReasons(reasons)
	for _, g := range targets {
		delete(why, g.key)
		for _, r := range []*ref{&g.ref, g.over, g.minus} {
			if r != nil && !slices.Contains(known, r.sampleKey) {
				t.Errorf("target %q: nothing measures %+v", g.key, *r)
			}
		}
	}
	if len(why) > 0 {
		t.Errorf("reasons.md has what is no target: %v", why)
	}
}

func TestCommittedReportIsThatOfItsResults(t *testing.T) {
	const dir = "../../docs/benchmarks"
	made := t.TempDir()
	if err := run(t.Context(), []string{"-render", dir + "/results.jsonl", "-report", made}, io.Discard, t.Output()); err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob(made + "/*")
	if err != nil || len(files) < 5 {
		t.Fatalf("%d files, error %v", len(files), err)
	}
	for _, f := range files {
		got, _ := os.ReadFile(f)
		want, err := os.ReadFile(filepath.Join(dir, filepath.Base(f)))
		if err != nil || !bytes.Equal(want, got) {
			t.Errorf("%s differs (go run ./test/bench -render docs/benchmarks/results.jsonl -report docs/benchmarks): %v", f, err)
		}
	}
}

// Samples arrive from a process whose lines have a prefix and end as on a terminal.
func TestSamplesOfAnotherProcess(t *testing.T) {
	var emitted bytes.Buffer
	start := func(emit io.Writer) *bench {
		return &bench{log: t.Output(), emit: emit, samples: map[sampleKey][]float64{}}
	}
	start(&emitted).add("close() → withdrawal", "bpf", 3, 1)
	b := start(io.Discard)
	collect := func(cmd *exec.Cmd) error {
		return attempt(func() { b.collect(cmd, (*exec.Cmd).Run) })
	}
	err := collect(exec.Command("printf", "%s", "[6.12] === RUN\r\n[6.12] "+strings.TrimSpace(emitted.String())+"\r\n"))
	k := sampleKey{Measure: "close() → withdrawal", Mode: "bpf", Size: 3}
	if err != nil || !slices.Equal(b.samples[k], []float64{1}) {
		t.Errorf("samples %v, error %v", b.samples, err)
	}
	if err := collect(exec.Command("sh", "-c", "echo why; exit 1")); err == nil || !strings.Contains(err.Error(), "why") {
		t.Errorf("error %v", err)
	}
}
