// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"cmp"
	"fmt"
	"strings"
)

// ref names a figure: the median of a cell, or its p99.
type ref struct {
	sampleKey
	p99 bool
}

// of names the median of a mode, and with at99 the p99.
func of(measure, mode string, size int) ref {
	return ref{sampleKey: sampleKey{Measure: measure, Mode: mode, Size: size}}
}

func bpf(measure string, size int) ref { return of(measure, modeBPF, size) }

func (f ref) at99() ref {
	f.p99 = true
	return f
}

// figure returns the figure and its unit, if it was measured.
func (r *results) figure(f ref) (v float64, unit string, ok bool) {
	c, ok := r.find(f.sampleKey)
	if f.p99 {
		return c.P99, c.Unit, ok && c.N >= enoughForP99
	}
	return c.Value, c.Unit, ok
}

// target is a figure to reach.
type target struct {
	key   string // of the reason in reasons.md if it is missed
	what  string
	ref   ref
	limit float64
	unit  string // of limit
	// atLeast means that the limit is a minimum.
	atLeast bool
	// over divides the figure by another, minus subtracts another.
	over, minus *ref
}

var targets = []target{
	{key: "open-p50", what: "listen() returns → message on the link, p50", ref: bpf(openMessage, 0), limit: 200e-6, unit: "s"},
	{key: "open-p99", what: "listen() returns → message on the link, p99", ref: bpf(openMessage, 0).at99(), limit: 2e-3, unit: "s"},
	{key: "close-p50", what: "close() returns → withdrawal on the link, p50", ref: bpf(closeMessage, 0), limit: 200e-6, unit: "s"},
	{key: "close-p99", what: "close() returns → withdrawal on the link, p99", ref: bpf(closeMessage, 0).at99(), limit: 2e-3, unit: "s"},
	{key: "nat-10", what: "NAT commit → message on the link, p99, 10 rules in the table", ref: bpf(natMessage, 10).at99(), limit: 5e-3, unit: "s"},
	{key: "nat-10000", what: "NAT commit → message on the link, p99, 10,000 rules in the table", ref: bpf(natMessage, 10_000).at99(), limit: 50e-3, unit: "s"},
	{key: "hook-unwatched", what: "added to a pair of listen() and close(): namespace not observed", ref: of(hookAdded, hookUnwatched, 0), limit: 0.1e-6, unit: "s"},
	{key: "hook-idle", what: "added to a pair of listen() and close(): observed, idle", ref: of(hookAdded, hookIdle, 0), limit: 7e-6, unit: "s"},
	{key: "hook-burst", what: "added to a pair of listen() and close(): observed, in a burst", ref: of(hookAdded, hookBurst, 0), limit: 1e-6, unit: "s"},
	{key: "idle-wake", what: "idle agent: seconds of a minute in which it wakes up (a timer every 10 s at most)", ref: bpf(idleAwake, 0), limit: 6, unit: "per minute"},
	{key: "idle-cpu", what: "idle agent: CPU", ref: bpf(idleCPU, 0), limit: 0.02, unit: "%"},
	{key: "idle-cpu-10000", what: "idle agent with 10,000 listeners and rules: CPU, as with none", ref: bpf(idleCPU, 10_000), limit: 0.02, unit: "%"},
	{key: "burst-2000", what: "burst of 2,000 listeners, none lost: the last is reported", ref: bpf(burstDone, 2000), limit: 20e-3, unit: "s"},
	{key: "burst-10000", what: "burst of 10,000 listeners, none lost: the last is reported", ref: bpf(burstDone, 10_000), limit: 200e-3, unit: "s"},
	{key: "burst-cpu-2000", what: "burst of 2,000 listeners: total CPU", ref: bpf(burstCPU, 2000), limit: 0.2, unit: "s"},
	{key: "burst-cpu-10000", what: "burst of 10,000 listeners: total CPU", ref: bpf(burstCPU, 10_000), limit: 1, unit: "s"},
	{key: "burst-rss", what: "burst of 10,000 listeners: memory (RSS)", ref: bpf(burstRSS, 10_000), limit: 48e6, unit: "B"},
	{key: "udp", what: "200 short-lived UDP binds per second beside 1,000 listeners: CPU", ref: bpf(udpCPU, 0), limit: 0.5, unit: "%"},
	{key: "rss", what: "idle agent: memory (RSS)", ref: bpf(idleRSS, 0), limit: 20e6, unit: "B"},
	{key: "rss-kube", what: "idle agent with Kubernetes: memory (RSS)", ref: bpf(kubeRSS, 0), limit: 40e6, unit: "B"},
	{key: "binary", what: "binary, stripped", ref: of(binarySize, "fairlead", 0), limit: 40e6, unit: "B"},
	{key: "start", what: "start of the agent → first sync", ref: bpf(startTime, 1), limit: 150e-3, unit: "s"},
	{key: "throughput", what: "TCP to the guest through the link, relative to the splice",
		ref: of(toGuest, wayLink, 0), over: new(of(toGuest, waySplice, 0)), limit: 0.6, unit: "×", atLeast: true},
	{key: "roundtrip", what: "round trip of 64 bytes through the link, beyond the splice, p50",
		ref: of(roundTrip, wayLink, 0), minus: new(of(roundTrip, waySplice, 0)), limit: 60e-6, unit: "s"},
	{key: "roundtrip-direct", what: "round trip of 64 bytes through the link, beyond no relay at all, p50",
		ref: of(roundTrip, wayLink, 0), minus: new(of(roundTrip, wayDirect, 0)), limit: 60e-6, unit: "s"},
}

// judge returns what was measured, and whether that meets the target.
func (t target) judge(r *results) (v float64, met, ok bool) {
	v, _, ok = r.figure(t.ref)
	if t.over != nil {
		other, _, found := r.figure(*t.over)
		v, ok = v/other, ok && found && other != 0
	}
	if t.minus != nil {
		other, _, found := r.figure(*t.minus)
		v, ok = v-other, ok && found
	}
	return v, v <= t.limit && !t.atLeast || v >= t.limit && t.atLeast, ok
}

// verdict is the table of targets, and why some were missed, by the numbers in it.
type verdict struct {
	table
	Reasons []string
}

func (r *results) verdict(targets []target, why map[string]string) verdict {
	v := verdict{table: table{Head: []string{"what", "target", "measured", "met"}}}
	for _, g := range targets {
		limit := "≤ " + value(g.limit, g.unit)
		if g.atLeast {
			limit = "≥ " + value(g.limit, g.unit)
		}
		row := []string{g.what, limit, missing, "not measured"}
		if figure, met, ok := g.judge(r); ok && met {
			row[2], row[3] = value(figure, g.unit), "yes"
		} else if ok {
			v.Reasons = append(v.Reasons, cmp.Or(why[g.key], "Not known yet."))
			row[2], row[3] = value(figure, g.unit), fmt.Sprintf("**no** (%d)", len(v.Reasons))
		}
		v.Rows = append(v.Rows, row)
	}
	return v
}

// parseReasons reads Markdown in which a heading of the second level is the key of a
// target.
func parseReasons(markdown string) map[string]string {
	out := map[string]string{}
	for _, part := range strings.Split("\n"+markdown, "\n## ")[1:] {
		key, text, _ := strings.Cut(part, "\n")
		out[key] = strings.Join(strings.Fields(text), " ")
	}
	return out
}
