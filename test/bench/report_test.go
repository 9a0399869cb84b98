// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bufio"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write the table of targets to docs/benchmarks")

const documents = "../../docs/benchmarks/"

// target is a figure to reach: what a benchmark has in a unit. Figures of less are less or equal.
type target struct {
	what, benchmark, unit string
	limit                 float64
	least                 bool // at least the limit; else at most
}

func targets() []target {
	const beside = " through the link, beside the splice"
	return []target{
		{"listen() → message on the link, p50, beside a raw reader", "Change/listen", "p50/raw", 1.5, false},
		{"the same, p99", "Change/listen", "p99/raw", 3, false},
		{"close() → withdrawal on the link, p50, beside a raw reader", "Change/close", "p50/raw", 1.5, false},
		{"the same, p99", "Change/close", "p99/raw", 3, false},
		{"context switches of the agent for one change after quiet", "Change/switches", "switches/change", 4, false},
		{"CPU for one change, 1 a second", "CPU/rate=1", "CPU-sec/change", 450e-6, false},
		{"CPU for one change, 100 a second", "CPU/rate=100", "CPU-sec/change", 250e-6, false},
		{"CPU for one change, 10,000 a second", "CPU/rate=10000", "CPU-sec/change", 12e-6, false},
		{"burst of 2,000 listeners: last reported", "Burst/listeners=2000", "last-sec", 18e-3, false},
		{"burst of 2,000 listeners: CPU", "Burst/listeners=2000", "CPU-sec", 70e-3, false},
		{"burst of 10,000 listeners: last reported", "Burst/listeners=10000", "last-sec", 110e-3, false},
		{"burst of 10,000 listeners: CPU", "Burst/listeners=10000", "CPU-sec", 350e-3, false},
		{"idle agent: anonymous memory", "Memory/ports=0", "agent-B", 7e6, false},
		{"per port: agent", "Memory/ports=10000", "agent-B/port", 600, false},
		{"per port: host", "Memory/ports=10000", "host-B/port", 1200, false},
		{"10,000 listeners, IPv4: anonymous memory of the agent", "Memory/ports=10000", "agent-B", 13e6, false},
		{"10,000 listeners, dual-stack: anonymous memory of the agent", "Memory/ports=10000-dual", "agent-B", 17e6, false},
		{"65,535 listeners, all open: anonymous memory of the agent", "Memory/ports=65535", "agent-B", 48e6, false},
		{"the same, of the host", "Memory/ports=65535", "host-B", 90e6, false},
		{"a range of 10,000 ports by one rule: what it adds to the agent", "Memory/range=10000", "agent-added-B", 1e6, false},
		{"the same, to the host", "Memory/range=10000", "host-added-B", 12e6, false},
		{"start of the agent: all reported", "Start", "reported-sec", 80e-3, false},
		{"start of the agent: CPU", "Start", "CPU-sec", 90e-3, false},
		{"1,000 set elements a second in tables without NAT: CPU of the agent beside the writer's", "Elements", "agent/writer", 0.03, false},
		{"binary, stripped", "Binary", "size-B", 26e6, false},
		{"TCP to the guest, 1 flow" + beside, "TCP/to=guest/flows=1", "link/splice", 0.97, true},
		{"TCP to the host, 1 flow" + beside, "TCP/to=host/flows=1", "link/splice", 0.97, true},
		{"TCP to the guest, 64 flows" + beside, "TCP/to=guest/flows=64", "link/splice", 0.95, true},
		{"TCP to the host, 64 flows" + beside, "TCP/to=host/flows=64", "link/splice", 0.95, true},
		{"1,000 connections a second: done", "Connections", "done/s", 995, true},
		{"1,000 connections a second: CPU for each" + beside, "Connections", "CPU/splice", 1.15, false},
		{"UDP echoes through the link, beside no relay", "UDP", "link/direct", 0.4, true},
		{"PostgreSQL through the link, select, 8 clients, beside direct", "PostgreSQL/clients=8", "link/direct", 0.7, true},
		{"PostgreSQL through the link, select, 100 clients, beside direct", "PostgreSQL/clients=100", "link/direct", 0.6, true},
	}
}

// results are the samples of each figure, by benchmark and unit, and what the head of the file says.
type results struct {
	samples map[string][]float64
	head    map[string]string
}

var processors = regexp.MustCompile(`-\d+$`)

// read reads what go test -bench has printed. A file that is not there has nothing.
func read(file string) (r results, err error) {
	r = results{make(map[string][]float64), make(map[string]string)}
	f, err := os.Open(file)
	if errors.Is(err, fs.ErrNotExist) {
		return r, nil
	}
	if err != nil {
		return r, err
	}
	defer func() { _ = f.Close() }()
	in := bufio.NewScanner(f)
	for in.Scan() {
		words := strings.Fields(in.Text())
		if key, value, ok := strings.Cut(in.Text(), ": "); ok && !strings.HasPrefix(key, "Benchmark") {
			r.head[key] = value
		}
		if len(words) < 4 || !strings.HasPrefix(words[0], "Benchmark") {
			continue
		}
		name := processors.ReplaceAllString(strings.TrimPrefix(words[0], "Benchmark"), "")
		for i := 2; i+1 < len(words); i += 2 {
			v, err := strconv.ParseFloat(words[i], 64)
			if err != nil {
				return r, fmt.Errorf("%s: %q: %w", file, in.Text(), err)
			}
			r.samples[name+" "+words[i+1]] = append(r.samples[name+" "+words[i+1]], v)
		}
	}
	return r, in.Err()
}

// show writes the median of a figure, and whether it reaches the target.
func (r results) show(t target) (text, met string) {
	samples := slices.Sorted(slices.Values(r.samples[t.benchmark+" "+t.unit]))
	if len(samples) == 0 {
		return "–", "–"
	}
	v := samples[len(samples)/2]
	if met = "**no**"; t.least && v >= t.limit || !t.least && v <= t.limit {
		met = "yes"
	}
	return format(v, t.unit), met
}

// format writes a figure with three digits and its unit.
func format(v float64, unit string) string {
	scale := func(factor float64, name string) string {
		return strconv.FormatFloat(v/factor, 'g', 3, 64) + " " + name
	}
	switch {
	case strings.HasPrefix(unit, "CPU-sec"), strings.HasSuffix(unit, "-sec"):
		if v < 1e-3 {
			return scale(1e-6, "µs")
		}
		return scale(1e-3, "ms")
	case strings.HasSuffix(unit, "-B/port"):
		return fmt.Sprintf("%.0f B", v)
	case strings.HasSuffix(unit, "-B"):
		return scale(1e6, "MB")
	case strings.Contains(unit, "/") && !strings.HasSuffix(unit, "/s") && unit != "switches/change":
		return scale(1, "×")
	}
	return scale(1, "")[:len(scale(1, ""))-1]
}

// report is the generated part of the document.
func report(before, now results) string {
	var b strings.Builder
	for _, key := range []string{"cpu", "kernel", "go", "commit", "date", "load"} {
		fmt.Fprintf(&b, "%s: %s; ", key, now.head[key])
	}
	if c := before.head["commit"]; c != "" {
		fmt.Fprintf(&b, "before: %s; ", c)
	}
	text := strings.TrimSuffix(b.String(), "; ") + ".\n\n| what | target | before | now | met |\n|---|--:|--:|--:|--:|\n"
	for _, t := range targets() {
		sign := "≤ "
		if t.least {
			sign = "≥ "
		}
		was, _ := before.show(t)
		is, met := now.show(t)
		text += fmt.Sprintf("| %s | %s | %s | %s | %s |\n", t.what, sign+format(t.limit, t.unit), was, is, met)
	}
	return text
}

var generated = regexp.MustCompile(`(?s)(<!-- targets, by "make bench" -->\n).*(<!-- end -->)`)

func TestReportIsUpToDate(t *testing.T) {
	before, err := read(documents + "before.txt")
	if err != nil {
		t.Fatal(err)
	}
	now, err := read(documents + "results.txt")
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(documents + "README.md")
	if err != nil || !generated.Match(text) {
		t.Fatalf("README.md has no place for the targets: %v", err)
	}
	want := generated.ReplaceAllString(string(text), "${1}"+report(before, now)+"${2}")
	if *update {
		if err := os.WriteFile(documents+"README.md", []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if string(text) != want {
		t.Error("docs/benchmarks/README.md is out of date: go -C test test ./bench -run Report -update")
	}
}

func TestReport(t *testing.T) {
	file := t.TempDir() + "/results"
	const text = "commit: abc\nBenchmarkChange/listen-2  1  0.0003 p50-sec  1.6 p50/raw\nBenchmarkChange/listen-2  1  0.0003 p50-sec  1.4 p50/raw\n" +
		"BenchmarkUDP-2  1  0.41 link/direct\nBenchmarkMemory/ports=0 1 7.1e+06 agent-B\nPASS\n"
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	now, err := read(file)
	if err != nil {
		t.Fatal(err)
	}
	none, err := read(file + "-absent")
	if err != nil {
		t.Fatal(err)
	}
	got := report(none, now)
	for _, want := range []string{
		"commit: abc; ", "p50, beside a raw reader | ≤ 1.5 × | – | 1.6 × | **no** |", "beside no relay | ≥ 0.4 × | – | 0.41 × | yes |",
		"idle agent: anonymous memory | ≤ 7 MB | – | 7.1 MB | **no** |", "binary, stripped | ≤ 26 MB | – | – | – |",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("no %q in\n%s", want, got)
		}
	}
}
