// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"bytes"
	"fmt"
	"io"
	"math"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/perf/benchfmt"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/wire"
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
	r := summarize("a", "sec", map[string][]float64{"sec": samples, "RSS-B": {3, 1, 2}})
	want := map[string]float64{"sec": 101, "p99-sec": 199.5, "max-sec": 201, "margin-sec": 14, "RSS-B": 2}
	if r.Iters != 201 || len(r.Values) != len(want) {
		t.Errorf("got %+v", r)
	}
	for unit, v := range want {
		if got, _ := r.Value(unit); math.Abs(got-v) > 0.5 {
			t.Errorf("%s is %v, want %v", unit, got, v)
		}
	}
	if r := summarize("a", "sec", map[string][]float64{"sec": {1, 2}}); len(r.Values) != 2 { // median and maximum
		t.Errorf("of two samples: %v", r.Values)
	}
}

// Dumps count once: those that the window has its share of are in its CPU time already.
func TestLongTermCostOfDumps(t *testing.T) {
	const window = 2 * time.Minute
	before := dumps{n: 1, seconds: 1}
	for _, c := range []struct {
		n, each float64 // dumps, and the seconds of one
		want    float64
	}{
		{0, 0, 0},
		{3, 0.0005, 0},      // each minute
		{2, 0.0039, 0},      // each two minutes
		{1, 0.01, 1. / 300}, // each five minutes
		{1, 0.06, 0.01},     // each ten minutes
	} {
		after := dumps{before.n + c.n, before.seconds + c.n*c.each}
		if got := after.longTerm(before, window); math.Abs(got-c.want) > 1e-6 {
			t.Errorf("%v dumps of %v s: %v %%, want %v", c.n, c.each, got, c.want)
		}
	}
}

func TestValueHasUnit(t *testing.T) {
	got := []string{
		value(214e-6, "sec"), value(-0.0456, "p99-sec"), value(0, "sec"), value(18.34e6, "RSS-B"), value(1.23e9, "B/s"), value(341e-6, "CPU-sec/GB"),
		value(0.00178, "%"), number(999.7), ratio(3036, 1), ratio(1, 4), ratio(1, 0),
	}
	want := []string{"214 µs", "-45.6 ms", "0.00 s", "18.3 MB", "1.23 GB/s", "341 µs/GB", "0.00178 %", "1,000", "3,036×", "0.25×", "–"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestTargetsAreJudged(t *testing.T) {
	result := func(name string, v float64) *benchfmt.Result {
		return &benchfmt.Result{Name: benchfmt.Name(name), Values: []benchfmt.Value{{Value: v, Unit: "sec"}}}
	}
	r := results{result("a/mode=x", 2), result("a/mode=y", 1)}
	const x, y = "a/mode=x sec", "a/mode=y sec"
	goals := []target{
		{What: "met", Figure: y, AtMost: 1, Why: "Never shown."},
		{What: "missed", Figure: x, AtMost: 1, Why: "It is far away."},
		{What: "ratio", Figure: x, Over: y, AtLeast: 3},
		{What: "more", Figure: x, Minus: y, AtMost: 1},
		{What: "p99", Figure: "a/mode=x p99-sec", AtMost: 1},
	}
	got := r.verdict(goals, nil)
	want := [][]string{
		{"met", "≤ 1.00 s", "1.00 s", "yes"}, {"missed", "≤ 1.00 s", "2.00 s", "**no** (1)"}, {"ratio", "≥ 3 ×", "2 ×", "**no** (2)"},
		{"more", "≤ 1.00 s", "1.00 s", "yes"}, {"p99", "≤ 1.00 s", "–", "not measured"},
	}
	if diff := cmp.Diff(want, got.Rows) + cmp.Diff([]string{"It is far away.", "Not known yet."}, got.Reasons); diff != "" {
		t.Error(diff)
	}
	// The median of three runs counts, and a ratio is one of values of the same run.
	var runs results
	for n, x := range []float64{1, 4, 0.5} {
		for _, res := range []*benchfmt.Result{result("a/mode=x", x), result("a/mode=y", x/4)} {
			res.SetConfig(runKey, fmt.Sprint(n+1))
			runs = append(runs, res)
		}
	}
	got = runs.verdict(goals, r)
	want = [][]string{
		{"what", "target", "before", "median of 3 runs", "lowest", "highest", "met"},
		{"met", "≤ 1.00 s", "1.00 s", "250 ms", "125 ms", "1.00 s", "yes"}, {"missed", "≤ 1.00 s", "2.00 s", "1.00 s", "500 ms", "4.00 s", "yes"},
		{"ratio", "≥ 3 ×", "2 ×", "4 ×", "4 ×", "4 ×", "yes"}, {"more", "≤ 1.00 s", "1.00 s", "750 ms", "375 ms", "3.00 s", "yes"},
		{"p99", "≤ 1.00 s", "–", "–", "–", "–", "not measured"},
	}
	if diff := cmp.Diff(want, append([][]string{got.Head}, got.Rows...)); diff != "" {
		t.Error(diff)
	}
}

// A report of several runs has the median of each value, of maxima the highest, and all samples.
func TestMediansOfRuns(t *testing.T) {
	var file strings.Builder
	for n, line := range []string{"3 1 sec 9 max-sec 7 RSS-B", "4 5 sec 6 max-sec", "5 2 sec 8 max-sec"} {
		fmt.Fprintf(&file, "run: %d\ncommit: c\nload: %d\n\nBenchmarkA/mode=x %s\n", n+1, n, line)
		if n == 1 {
			file.WriteString("why: it broke\n\nBenchmarkFailed/b 1 1 failures\nwhy:\n\n")
		}
	}
	name := filepath.Join(t.TempDir(), "results")
	if err := os.WriteFile(name, []byte(file.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	r, err := readResults(name)
	if err != nil || len(r.byRun()) != 3 {
		t.Fatalf("results %v, error %v", r, err)
	}
	one := r.medians().find("A/mode=x")
	want := []benchfmt.Value{{Value: 2, Unit: "sec"}, {Value: 9, Unit: "max-sec"}, {Value: 7, Unit: "RSS-B"}}
	if diff := cmp.Diff(want, one.Values); diff != "" || one.Iters != 12 {
		t.Errorf("%d samples, %s", one.Iters, diff)
	}
	got := []any{r.Config("commit"), r.Config("load"), r.failed()}
	if diff := cmp.Diff([]any{"c", "0; 1; 2", map[string]string{"b, run 2": "it broke"}}, got); diff != "" {
		t.Error(diff)
	}
}

func TestEveryTargetIsMeasured(t *testing.T) {
	known := map[string]bool{"": true}
	for _, m := range measures() {
		for _, k := range m.keys() {
			known[k.name] = true
		}
	}
	goals, err := targets()
	if err != nil || len(goals) == 0 {
		t.Fatalf("%d targets, error %v", len(goals), err)
	}
	for _, g := range goals {
		for _, f := range []string{g.Figure, g.Over, g.Minus} {
			if name, _, _ := strings.Cut(f, " "); !known[name] {
				t.Errorf("target %q: nothing measures %q", g.What, name)
			}
		}
		if g.AtMost == 0 && g.AtLeast == 0 {
			t.Errorf("target %q has no limit", g.What)
		}
	}
}

func TestCommittedReportIsThatOfItsResults(t *testing.T) {
	const dir = "../../docs/benchmarks"
	made := t.TempDir()
	if err := run(t.Context(), []string{"-render", dir + "/results.txt", "-before", dir + "/before.txt", "-report", made}, io.Discard, t.Output()); err != nil {
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
			t.Errorf("%s differs (go run ./test/bench -render docs/benchmarks/results.txt -before docs/benchmarks/before.txt -report docs/benchmarks): %v", f, err)
		}
	}
}

// Results arrive from a process whose lines have a prefix and end as on a terminal.
func TestResultsOfAnotherProcess(t *testing.T) {
	collect := func(cmd *exec.Cmd) (results, error) {
		machine := []benchfmt.Config{{Key: "cpu", Value: []byte("own"), File: true}, {Key: runKey, Value: []byte("2"), File: true}}
		b := &bench{log: t.Output(), out: benchfmt.NewWriter(io.Discard), machine: machine}
		err := attempt(func() { b.collect(cmd, (*exec.Cmd).Run) })
		return b.results, err
	}
	got, err := collect(exec.Command("printf", "%s", "[6.12] === RUN\r\n[6.12] os: another\r\n[6.12] methods: bpf: tp_btf\r\n[6.12] BenchmarkClose/mode=bpf 3 1 sec\r\n[6.12] BenchmarkRun 1 1 sec\r\n"))
	if err != nil || len(got) != 1 || string(got[0].Name) != "Close/mode=bpf" || got.Config("methods") != "bpf: tp_btf" {
		t.Errorf("results %v, error %v", got, err)
	}
	// The rest is of this run.
	if got.Config("cpu") != "own" || got.Config(runKey) != "2" || got.Config("os") != "" {
		t.Errorf("properties %v", got[0].Config)
	}
	for _, script := range []string{"echo why; exit 1", "echo why: why; echo BenchmarkFailed/a 1 1 failures; exit 1"} {
		if _, err := collect(exec.Command("sh", "-c", script)); err == nil || !strings.Contains(err.Error(), "why") {
			t.Errorf("error %v", err)
		}
	}
}

// A port can be reported again before it is withdrawn, by a poller that finds its owner later.
func TestPeerWaitsForItsMessage(t *testing.T) {
	p := &peer{want: make(map[port.Key]awaited), now: make(map[port.Key]bool), ever: make(map[port.Key]bool)}
	k := tcpKey(80)
	put := func(owner string) []wire.Publication {
		return []wire.Publication{{Key: k, Owner: port.Owner{Name: owner}, Host: []netip.AddrPort{k.AddrPort()}}}
	}
	at := func(n int) time.Time { return time.Unix(int64(n), 0) }
	gone := p.expectGone(k)
	p.receive(put("web"), nil, at(1))
	p.receive(nil, []port.Key{k}, at(2))
	if got := gone(t.Context()); got != at(2) {
		t.Errorf("withdrawn at %v", got)
	}
	named := p.expect(k, "web")
	p.receive(nil, []port.Key{k}, at(3))
	p.receive(put("sh"), nil, at(4))
	p.receive(put("web"), nil, at(5))
	if got := named(t.Context()); got != at(5) {
		t.Errorf("named at %v", got)
	}
}
