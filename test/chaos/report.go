// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"time"
)

// result is what one run found.
type result struct {
	Seed        uint64
	Kernel      string // its release
	Emulated    bool
	Minutes     float64
	Engines     map[string]int // the most ports that each declared at the same time
	Operations  int
	Faults      map[string][]time.Duration // from the end of each fault to no difference
	Differences int
	Lost        int // the most events that an agent with small buffers lost
	TCP, UDP    tally
	Load        load
}

// load is how busy the machine was: times to converge are to be judged with it.
type load struct {
	Mean, Most float64 // of /proc/loadavg over a minute: processes that run or wait to
	Processors int
}

func (l load) String() string {
	if l.Processors == 0 {
		return "not known"
	}
	return fmt.Sprintf("%.1f (at most %.1f) on %d", l.Mean, l.Most, l.Processors)
}

// tally counts flows: of UDP, Cut are datagrams without an answer.
type tally struct{ Complete, Cut, Wrong int64 }

func (t tally) plus(o tally) tally {
	return tally{t.Complete + o.Complete, t.Cut + o.Cut, t.Wrong + o.Wrong}
}

func (r result) failed() bool { return r.Differences > 0 || r.TCP.Wrong > 0 || r.UDP.Wrong > 0 }

// String is one line for the one who watches.
func (r result) String() string {
	return fmt.Sprintf("seed %d on %s, %g minutes: %d operations, %d faults, %d differences; flows of TCP %+v, of UDP %+v; load %s",
		r.Seed, r.Kernel, r.Minutes, r.Operations, len(r.times()), r.Differences, r.TCP, r.UDP, r.Load)
}

func (r result) kernel() string {
	if r.Emulated {
		return r.Kernel + ", emulated"
	}
	return r.Kernel
}

func (r result) engines() string {
	var list []string
	for _, name := range slices.Sorted(maps.Keys(r.Engines)) {
		list = append(list, fmt.Sprintf("%s (%d)", name, r.Engines[name]))
	}
	return strings.Join(list, ", ")
}

// times are those of all faults, sorted.
func (r result) times() []time.Duration {
	return slices.Sorted(func(yield func(time.Duration) bool) {
		for _, all := range r.Faults {
			for _, t := range all {
				if !yield(t) {
					return
				}
			}
		}
	})
}

// quantile of sorted times.
func quantile(times []time.Duration, p float64) time.Duration {
	if len(times) == 0 {
		return 0
	}
	return times[min(len(times)-1, int(p*float64(len(times))))].Round(time.Millisecond)
}

// report is the text on several runs: each run, and the faults of all.
func report(all []result) string {
	var b strings.Builder
	faults := 0
	sum := result{Faults: map[string][]time.Duration{}}
	b.WriteString("| seed | kernel | engines (ports at most) | minutes | load | operations | faults | differences | events lost | p50 | p99 |\n|---|---|---|---|---|---|---|---|---|---|---|\n")
	for _, r := range all {
		t := r.times()
		fmt.Fprintf(&b, "| %d | %s | %s | %g | %s | %d | %d | %d | %d | %s | %s |\n", r.Seed, r.kernel(), r.engines(),
			r.Minutes, r.Load, r.Operations, len(t), r.Differences, r.Lost, quantile(t, .5), quantile(t, .99))
		faults += len(t)
		sum.Minutes += r.Minutes
		sum.Operations += r.Operations
		sum.Differences += r.Differences
		sum.TCP, sum.UDP = sum.TCP.plus(r.TCP), sum.UDP.plus(r.UDP)
		if r.Emulated {
			continue // its times are those of a slow processor
		}
		for name, times := range r.Faults {
			sum.Faults[name] = append(sum.Faults[name], times...)
		}
	}
	times := sum.times()
	fmt.Fprintf(&b, "\nIn all %g minutes: %d operations, %d faults, %d differences.\n", sum.Minutes, sum.Operations, faults, sum.Differences)
	fmt.Fprintf(&b, "TCP flows: %d complete, %d cut and seen as cut, %d wrong. UDP: %d answered, %d without an answer, %d wrong.\n",
		sum.TCP.Complete, sum.TCP.Cut, sum.TCP.Wrong, sum.UDP.Complete, sum.UDP.Cut, sum.UDP.Wrong)
	fmt.Fprintf(&b, "Converged after a fault, without emulated kernels: p50 %s, p99 %s, at most %s.\n\n| fault | times | p50 | slowest |\n|---|---|---|---|\n",
		quantile(times, .5), quantile(times, .99), quantile(times, 1))
	for _, name := range slices.Sorted(maps.Keys(sum.Faults)) {
		t := slices.Sorted(slices.Values(sum.Faults[name]))
		fmt.Fprintf(&b, "| %s | %d | %s | %s |\n", name, len(t), quantile(t, .5), quantile(t, 1))
	}
	return b.String()
}

const begin, end = "<!-- chaos: written by test/chaos -->\n", "<!-- chaos: end -->\n"

// writeReport replaces what is between the markers of a document.
func writeReport(path, text string) error {
	old, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	head, rest, ok := strings.Cut(string(old), begin)
	_, tail, ok2 := strings.Cut(rest, end)
	if !ok || !ok2 {
		return fmt.Errorf("%s has no markers %q and %q", path, begin, end)
	}
	return os.WriteFile(path, []byte(head+begin+text+end+tail), 0o644)
}
