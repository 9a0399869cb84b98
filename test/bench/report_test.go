// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"bytes"
	"encoding/json"
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
	for i := 201; i > 0; i-- {
		samples = append(samples, float64(i))
	}
	if d := summarize(samples); d.N != 201 || d.Value != 101 || d.Max != 201 || d.P99 < 198 || d.P99 > 200 || d.Margin < 5 || d.Margin > 20 {
		t.Errorf("got %+v", d)
	}
	if d := summarize([]float64{1, 2}); d.Margin != 0 {
		t.Errorf("two samples have a margin of %v", d.Margin)
	}
}

func TestValueHasUnit(t *testing.T) {
	for _, c := range []struct {
		v    float64
		unit string
		want string
	}{
		{214e-6, "s", "214 µs"}, {0.0456, "s", "45.6 ms"}, {5.3e-9, "s", "5.30 ns"}, {-35e-6, "s", "-35.0 µs"}, {0, "s", "0.00 s"},
		{18.34e6, "B", "18.3 MB"}, {1.09e9, "B/s", "1.09 GB/s"}, {0.00178, "%", "0.00178 %"},
		{12345, "per second", "12,345 per second"}, {10_000, "", "10,000"}, {999.7, "", "1,000"},
	} {
		if got := value(c.v, c.unit); got != c.want {
			t.Errorf("value(%v, %q) = %q, want %q", c.v, c.unit, got, c.want)
		}
	}
	if got := []string{ratio(3036, 1), ratio(1, 4), ratio(1, 0)}; !slices.Equal(got, []string{"3,036×", "0.25×", "–"}) {
		t.Errorf("ratios %q", got)
	}
}

func TestTargets(t *testing.T) {
	r := &results{cells: []cell{{Measure: "a", Mode: "x", Unit: "s", dist: dist{Value: 2}}, {Measure: "a", Mode: "y", Unit: "s", dist: dist{Value: 1}}}}
	x, y := ref{measure: "a", mode: "x"}, ref{measure: "a", mode: "y"}
	all := []target{
		{key: "met", what: "met", ref: y, limit: 1, unit: "s"},
		{key: "missed", what: "missed", ref: x, limit: 1, unit: "s"},
		{key: "ratio", what: "ratio", ref: x, over: &y, limit: 3, unit: "×", atLeast: true},
		{key: "more", what: "more", ref: x, minus: &y, limit: 1, unit: "s"},
		{key: "p99", what: "p99", ref: x.at99(), limit: 1, unit: "s"},
	}
	want := [][]string{
		{"met", "≤ 1.00 s", "1.00 s", "yes"}, {"missed", "≤ 1.00 s", "2.00 s", "**no** (1)"}, {"ratio", "≥ 3 ×", "2 ×", "**no** (2)"},
		{"more", "≤ 1.00 s", "1.00 s", "yes"}, {"p99", "≤ 1.00 s", "–", "not measured"},
	}
	if diff := cmp.Diff(want, r.targets(all).Rows); diff != "" {
		t.Error(diff)
	}
	why := parseReasons("Preamble.\n\n## missed\n\nIt is\nfar away.\n\n## met\n\nNever shown.\n")
	if got := r.reasons(all, why); !slices.Equal(got, []string{"It is far away.", "Not known yet."}) {
		t.Errorf("reasons %q", got)
	}
}

// The committed report is that of the committed results.
func TestCommittedReport(t *testing.T) {
	const dir = "../../docs/benchmarks"
	res, err := readFile(filepath.Join(dir, "results.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	made := t.TempDir()
	if err := writeReportDir(made, res); err != nil {
		t.Fatal(err)
	}
	files, err := os.ReadDir(made)
	if err != nil || len(files) < 5 {
		t.Fatalf("%d files, error %v", len(files), err)
	}
	for _, f := range files {
		got, err := os.ReadFile(filepath.Join(made, f.Name()))
		if err != nil {
			t.Fatal(err)
		}
		want, err := os.ReadFile(filepath.Join(dir, f.Name()))
		if err != nil || !bytes.Equal(want, got) {
			t.Errorf("%s differs (go run ./test/bench -render docs/benchmarks/results.jsonl -report docs/benchmarks): %v", f.Name(), err)
		}
	}
	readme, _ := os.ReadFile(filepath.Join(made, "README.md"))
	for _, p := range parts() {
		for _, m := range p.measures {
			if !strings.Contains(string(readme), "**"+m.name+"**") {
				t.Errorf("no table of %q", m.name)
			}
		}
	}
}

func TestEveryTargetIsMeasured(t *testing.T) {
	known := map[string]measure{}
	for _, p := range parts() {
		for _, m := range p.measures {
			known[m.name] = m
		}
	}
	for _, g := range targets {
		for _, r := range []*ref{&g.ref, g.over, g.minus} {
			if r == nil {
				continue
			}
			if m := known[r.measure]; !slices.Contains(m.modes, r.mode) || !slices.Contains(m.eachSize(), r.size) {
				t.Errorf("target %q: nothing measures %+v", g.key, *r)
			}
		}
	}
	for key := range parseReasons(reasons) {
		if !slices.ContainsFunc(targets, func(g target) bool { return g.key == key }) {
			t.Errorf("reasons.md has %q, which is no target", key)
		}
	}
}

// Samples arrive from a process whose lines have a prefix and end as on a terminal.
func TestSamplesOfAnotherProcess(t *testing.T) {
	var log bytes.Buffer
	b := &bench{log: &log, samples: map[sampleKey][]float64{}, methods: map[string]string{}}
	k := sampleKey{Measure: "close() → withdrawal", Mode: "bpf", Size: 3}
	text, err := json.Marshal(sample{sampleKey: k, Values: []float64{1, 2}})
	if err != nil {
		t.Fatal(err)
	}
	collect := func(cmd *exec.Cmd) error {
		return attempt(func() { b.collect(cmd, (*exec.Cmd).Run) })
	}
	err = collect(exec.Command("printf", "%s", "[6.12] === RUN\r\n[6.12] "+sampleMark+string(text)+"\r\n"))
	if err != nil || !slices.Equal(b.samples[k], []float64{1, 2}) {
		t.Errorf("samples %v, error %v", b.samples, err)
	}
	if err := collect(exec.Command("sh", "-c", "echo why; exit 1")); err == nil || !strings.Contains(err.Error(), "why") {
		t.Errorf("error %v", err)
	}
}
