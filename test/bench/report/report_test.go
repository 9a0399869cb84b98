// SPDX-License-Identifier: Apache-2.0

package report

import (
	"bytes"
	"encoding/xml"
	"errors"
	"flag"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "write the golden files")

func TestQuantilesAreSamplesThatThatShareDoesNotExceed(t *testing.T) {
	var samples []float64
	for i := 200; i > 0; i-- {
		samples = append(samples, float64(i))
	}
	d := Summarize(samples)
	got := []float64{float64(d.N), d.Min, d.P50, d.P90, d.P99, d.Max, d.Quantiles[0], d.Quantiles[100]}
	if want := []float64{200, 1, 100, 180, 198, 200, 1, 200}; !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	if d := Summarize([]float64{7}); d.P50 != 7 || d.P99 != 7 || d.Min != 7 {
		t.Errorf("one sample: %+v", d)
	}
}

func TestFiguresAreWrittenInUnitsThatFitThem(t *testing.T) {
	for _, c := range []struct {
		v    float64
		unit string
		want string
	}{
		{214e-6, "s", "214 µs"}, {0.0456, "s", "45.6 ms"}, {5.3e-9, "s", "5.3 ns"}, {2, "s", "2 s"}, {0, "s", "0 ns"},
		{-35e-6, "s", "-35 µs"}, {18.34e6, "B", "18.3 MB"}, {999, "B", "999 B"}, {1.09e9, "B/s", "1.09 GB/s"},
		{0.00178, "%", "0.00178 %"}, {100, "%", "100 %"}, {12345, "per second", "12,345 per second"}, {10_000, "", "10,000"},
	} {
		if got := Value(c.v, c.unit); got != c.want {
			t.Errorf("Value(%v, %q) = %q, want %q", c.v, c.unit, got, c.want)
		}
	}
	if a, b, c := Ratio(3036, 1), Ratio(1, 4), Ratio(1, 0); a != "3,036×" || b != "0.25×" || c != "–" {
		t.Errorf("ratios %q %q %q", a, b, c)
	}
}

func cells() []Cell {
	sampled := func(mode string, v float64) Cell {
		var s []float64
		for i := range 100 {
			s = append(s, v*(0.5+float64(i)/100))
		}
		d := Summarize(s)
		return Cell{Part: "latency", Measure: "open", Mode: mode, Unit: "s", By: "method of " + mode, Dist: d, Value: d.P50}
	}
	one := func(measure, mode string, size, v float64) Cell {
		return Cell{Part: "idle", Measure: measure, Mode: mode, Size: size, SizeUnit: "ports", Unit: "%", Value: v}
	}
	broken := one("cpu", "poll 1 s", 1000, 0)
	broken.Failed = "the agent lost 3 events"
	return []Cell{
		sampled("bpf", 200e-6), sampled("poll 1 s", 0.5),
		one("cpu", "bpf", 0, 0.01), one("cpu", "poll 1 s", 0, 0.8), one("cpu", "bpf", 1000, 0.02), broken,
		{Part: "flows", Measure: "throughput", Mode: "direct | none", Unit: "B/s", Value: 2e9},
		{Part: "flows", Measure: "throughput", Mode: "fairlead", Unit: "B/s", Value: 1e9, Extra: map[string]float64{"p99 µs": 12.5}},
	}
}

func document() Document {
	return Document{
		Modes:   []string{"bpf", "poll 1 s"},
		Glances: []Glance{{What: "a port is told", Part: "latency", Measure: "open"}, {What: "idle, 1,000 ports", Part: "idle", Measure: "cpu", Size: 1000}},
		Words:   func(*Results) string { return "Words about it." },
		Targets: []Target{
			{Key: "reached", What: "open", Ref: Ref{Part: "latency", Measure: "open", Mode: "bpf"}, Limit: 1e-3, Unit: "s"},
			{Key: "missed", What: "open, p99", Ref: Ref{Part: "latency", Measure: "open", Mode: "bpf", Stat: P99}, Limit: 1e-5, Unit: "s"},
			{Key: "unmeasured", What: "close", Ref: Ref{Part: "latency", Measure: "close", Mode: "bpf"}, Limit: 1, Unit: "s"},
			{Key: "broken", What: "idle", Ref: Ref{Part: "idle", Measure: "cpu", Mode: "poll 1 s", Size: 1000}, Limit: 1, Unit: "%"},
			{Key: "ratio", What: "throughput", Ref: Ref{Part: "flows", Measure: "throughput", Mode: "fairlead"},
				Over: &Ref{Part: "flows", Measure: "throughput", Mode: "direct | none"}, Limit: 0.6, Unit: "×", AtLeast: true},
		},
		Reasons: Reasons("Preamble.\n\n## missed\n\nIt is\nfar away.\n\n## reached\n\nNever shown.\n"),
		Sections: []Section{
			{Name: "latency", Title: "Latency", About: "About it.", Figures: []Figure{{File: "open", Title: "Open <1>", Measure: "open", Kind: Distribution, X: "time", Y: "share", LogX: true}},
				Reading: func(*Results) string { return "What it means." }},
			{Name: "idle", Title: "Idle", Figures: []Figure{
				{File: "cpu", Title: "CPU", Measure: "cpu", Kind: Bars, X: "ports", Y: "CPU", LogY: true},
				{File: "cpu-lines", Title: "CPU", Measure: "cpu", Kind: Lines, X: "ports", Y: "CPU"},
				{File: "nothing", Title: "Nothing", Measure: "not there", Kind: Lines}}},
			{Name: "flows", Title: "Flows", Base: "fairlead", Figures: []Figure{{File: "flows", Title: "Flows", Measure: "throughput", Kind: Bars, Y: "rate"}}},
			{Name: "not run", Title: "Not run"},
		},
	}
}

// results are as they are read back from a file.
func results(t *testing.T) *Results {
	t.Helper()
	var b bytes.Buffer
	s := NewSink(&b)
	m := Machine{CPU: "A processor", CPUs: 2, MemoryMB: 8000, Kernel: "6.1.0", Go: "1.26", Commit: "0123456789ab", Scale: "full",
		Date: time.Date(2026, 11, 21, 22, 0, 0, 0, time.UTC), Load: "0.10 0.20 0.30"}
	errs := []error{s.Machine(m)}
	for _, c := range cells() {
		errs = append(errs, s.Cell(c))
	}
	m.Seconds, m.LoadAfter = 600.7, "1.00 0.50 0.40"
	r, err := Read(io.MultiReader(&b, line0(t, m)))
	if err := errors.Join(append(errs, err)...); err != nil {
		t.Fatal(err)
	}
	return r
}

func line0(t *testing.T, m Machine) io.Reader {
	t.Helper()
	var b bytes.Buffer
	if err := NewSink(&b).Machine(m); err != nil {
		t.Fatal(err)
	}
	return &b
}

func TestWhatIsReadBackIsWhatWasWritten(t *testing.T) {
	r := results(t)
	if diff := cmp.Diff(cells(), r.Cells); diff != "" {
		t.Error(diff)
	}
	if r.Machine.Seconds != 600.7 || r.Machine.CPUs != 2 {
		t.Errorf("machine %+v", r.Machine)
	}
	for _, bad := range []string{"{}", "no JSON", `{"cell": 3}`} {
		if _, err := Read(strings.NewReader(bad)); err == nil {
			t.Errorf("%q is taken", bad)
		}
	}
}

func TestReportIsTheGoldenOne(t *testing.T) {
	dir := t.TempDir()
	// What an older run left is gone.
	if err := os.WriteFile(filepath.Join(dir, "old.svg"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := WriteDir(dir, results(t), document()); err != nil {
		t.Fatal(err)
	}
	golden := "testdata"
	if *update {
		if err := WriteDir(golden, results(t), document()); err != nil {
			t.Fatal(err)
		}
	}
	names := func(dir string) (out []string) {
		files, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			out = append(out, f.Name())
		}
		return out
	}
	if diff := cmp.Diff(names(golden), names(dir)); diff != "" {
		t.Fatalf("files (-want +got):\n%s", diff)
	}
	for _, name := range names(dir) {
		got, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		want, err := os.ReadFile(filepath.Join(golden, name))
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(string(want), string(got)); diff != "" {
			t.Errorf("%s (-want +got; go test -update writes it):\n%s", name, diff)
		}
		if strings.HasSuffix(name, ".svg") {
			wellFormed(t, name, got)
		}
	}
}

func wellFormed(t *testing.T, name string, svg []byte) {
	t.Helper()
	for d := xml.NewDecoder(bytes.NewReader(svg)); ; {
		_, err := d.Token()
		if errors.Is(err, io.EOF) {
			return
		}
		if err != nil {
			t.Errorf("%s: %v", name, err)
			return
		}
	}
}

func TestFailedCellsAreNamedAndComparedWithNothing(t *testing.T) {
	r := &Results{Cells: []Cell{
		{Part: "p", Measure: "m", Mode: "bpf", Unit: "s", Failed: "the agent has ended"},
		{Part: "p", Measure: "m", Mode: "poll 1 s", Unit: "s", Value: 1},
	}}
	d := Document{Modes: []string{"bpf", "poll 1 s"}, Glances: []Glance{{What: "it", Part: "p", Measure: "m"}}, Sections: []Section{{Name: "p", Title: "P"}}}
	var b bytes.Buffer
	if err := Write(&b, r, d); err != nil {
		t.Fatal(err)
	}
	if text := b.String(); strings.Contains(text, "×") || !strings.Contains(text, "* p: m, bpf: the agent has ended\n") {
		t.Errorf("the report has a ratio, or does not name the cell:\n%s", text)
	}
}

func TestAxesSpanTheirValues(t *testing.T) {
	for _, c := range []struct {
		values []float64
		log    bool
	}{{[]float64{0.003, 170}, true}, {[]float64{5}, true}, {[]float64{0}, true}, {[]float64{10, 10}, true}, {[]float64{0}, false}, {[]float64{3, 99}, false}, {nil, false}} {
		a := newAxis(c.values, c.log, 0, 100, "")
		for _, v := range append(c.values, a.ticks()...) {
			if p := a.at(v); p < -0.01 || p > 100.01 {
				t.Errorf("%v: %v is drawn at %v of 100", c.values, v, p)
			}
		}
		if n := len(a.ticks()); n < 2 || n > 12 {
			t.Errorf("%v: %d ticks", c.values, n)
		}
	}
}
