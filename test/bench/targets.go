// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"fmt"
	"strings"
)

// ref names a figure: the median of a cell, or its p99.
type ref struct {
	measure, mode string
	size          int
	p99           bool
}

func bpf(measure string, size int) ref { return ref{measure: measure, mode: modeBPF, size: size} }

func (f ref) at99() ref {
	f.p99 = true
	return f
}

// figure returns the figure and its unit, if it was measured.
func (r *results) figure(f ref) (v float64, unit string, ok bool) {
	c, ok := r.find(f.measure, f.mode, f.size)
	if f.p99 {
		return c.P99, c.Unit, ok && c.N >= enoughForP99
	}
	return c.Value, c.Unit, ok
}

// glance is a row of the first table: events beside two pollers.
type glance struct {
	what    string
	measure string
	size    int
	pollers []string // ownModes[1:] if nil
}

var glances = []glance{
	{what: "TCP port reported, median", measure: openMessage},
	{what: "UDP port reported, median", measure: bindMessage},
	{what: "client on the host can connect, median", measure: openHost},
	{what: "closed port withdrawn, median", measure: closeMessage},
	{what: "NAT rule among 1,000 reported, median (pollers: kernel dump, iptables-save)", measure: natMessage, size: 1000, pollers: natModes[1:]},
	{what: "container in the guest's network has its owner, median", measure: containerHost},
	{what: "published port of a container has its owner, median (pollers: list of containers)", measure: containerPublished, pollers: listModes[1:]},
	{what: "node port of a Service reported, median (pollers: list of Services)", measure: serviceMessage, pollers: listModes[1:]},
	{what: "ports seen that live 10 ms", measure: missedShare, size: 10},
	{what: "ports seen that live 100 ms", measure: missedShare, size: 100},
	{what: "ports seen that live 1 s", measure: missedShare, size: 1000},
	{what: "ports seen that live 5 s", measure: missedShare, size: 5000},
	{what: "idle, no ports: CPU", measure: idleCPU},
	{what: "idle, 10,000 ports and rules: CPU", measure: idleCPU, size: 10_000},
	{what: "idle, no ports: seconds of a minute with a wake-up", measure: idleAwake},
	{what: "idle, no ports: memory", measure: idleRSS},
	{what: "idle, 10,000 ports and rules: memory", measure: idleRSS, size: 10_000},
	{what: "1 change per second: CPU for each", measure: churnCPU, size: 1},
	{what: "100 changes per second: CPU for each", measure: churnCPU, size: 100},
	{what: "10,000 changes per second: CPU for each", measure: churnCPU, size: 10_000},
	{what: "burst of 2,000 listeners: until all are reported", measure: burstDone, size: 2000},
	{what: "burst of 10,000 listeners: total CPU", measure: burstCPU, size: 10_000},
	{what: "start of the agent: until all ports are reported", measure: startTime, size: 1},
}

func (r *results) glance(glances []glance) table {
	t := table{Head: append([]string{""}, ownModes...)}
	for _, m := range ownModes[1:] {
		t.Head = append(t.Head, m+" : "+ownModes[0])
	}
	for _, g := range glances {
		events, unit, ok := r.figure(bpf(g.measure, g.size))
		if !ok {
			continue
		}
		pollers := g.pollers
		if pollers == nil {
			pollers = ownModes[1:]
		}
		row, ratios := []string{g.what, value(events, unit)}, []string{}
		for _, m := range pollers {
			text, times := missing, ""
			if v, _, ok := r.figure(ref{measure: g.measure, mode: m, size: g.size}); ok {
				text, times = value(v, unit), ratio(v, events)
			}
			row, ratios = append(row, text), append(ratios, times)
		}
		t.Rows = append(t.Rows, append(row, ratios...))
	}
	return t
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
	{key: "hook-unwatched", what: "added to a pair of listen() and close(): namespace not observed", ref: ref{measure: hookAdded, mode: hookUnwatched}, limit: 0.1e-6, unit: "s"},
	{key: "hook-idle", what: "added to a pair of listen() and close(): observed, idle", ref: ref{measure: hookAdded, mode: hookIdle}, limit: 7e-6, unit: "s"},
	{key: "hook-burst", what: "added to a pair of listen() and close(): observed, in a burst", ref: ref{measure: hookAdded, mode: hookBurst}, limit: 1e-6, unit: "s"},
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
	{key: "binary", what: "binary, stripped", ref: ref{measure: binarySize, mode: "fairlead"}, limit: 40e6, unit: "B"},
	{key: "start", what: "start of the agent → first sync", ref: bpf(startTime, 1), limit: 150e-3, unit: "s"},
	{key: "throughput", what: "TCP to the guest through the link, relative to the splice",
		ref: ref{measure: toGuest, mode: wayLink}, over: &ref{measure: toGuest, mode: waySplice}, limit: 0.6, unit: "×", atLeast: true},
	{key: "roundtrip", what: "round trip of 64 bytes through the link, beyond the splice, p50",
		ref: ref{measure: roundTrip, mode: wayLink}, minus: &ref{measure: roundTrip, mode: waySplice}, limit: 60e-6, unit: "s"},
	{key: "roundtrip-direct", what: "round trip of 64 bytes through the link, beyond no relay at all, p50",
		ref: ref{measure: roundTrip, mode: wayLink}, minus: &ref{measure: roundTrip, mode: wayDirect}, limit: 60e-6, unit: "s"},
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

func (r *results) targets(targets []target) table {
	t := table{Head: []string{"what", "target", "measured", "met"}}
	missed := 0
	for _, g := range targets {
		limit := "≤ " + value(g.limit, g.unit)
		if g.atLeast {
			limit = "≥ " + value(g.limit, g.unit)
		}
		measured, said := missing, "not measured"
		if v, met, ok := g.judge(r); ok && met {
			measured, said = value(v, g.unit), "yes"
		} else if ok {
			missed++
			measured, said = value(v, g.unit), fmt.Sprintf("**no** (%d)", missed)
		}
		t.Rows = append(t.Rows, []string{g.what, limit, measured, said})
	}
	return t
}

// reasons returns why targets were missed, in the order and by the numbers of the table.
func (r *results) reasons(targets []target, why map[string]string) []string {
	var out []string
	for _, g := range targets {
		if _, met, ok := g.judge(r); ok && !met {
			reason := why[g.key]
			if reason == "" {
				reason = "Not known yet."
			}
			out = append(out, reason)
		}
	}
	return out
}

// parseReasons reads Markdown in which a heading of the second level is the key of a
// target.
func parseReasons(markdown string) map[string]string {
	out := map[string]string{}
	for _, part := range strings.Split("\n"+markdown, "\n## ")[1:] {
		key, text, _ := strings.Cut(part, "\n")
		out[strings.TrimSpace(key)] = strings.Join(strings.Fields(text), " ")
	}
	return out
}
