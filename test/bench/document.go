// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	_ "embed"
	"fmt"
	"strings"

	"github.com/fairlead/fairlead/test/bench/report"
)

// reasons say why targets are not reached. They are claims about causes, not
// figures of a run, and are shown only where a run does not reach the target.
//
//go:embed reasons.md
var reasons string

// document is what the report has beside the results.
func document() report.Document {
	d := report.Document{
		Modes:   []string{modeBPF, modePoll1, modePoll3},
		Glances: glances, Words: words, Targets: targets(), Reasons: report.Reasons(reasons),
	}
	for _, p := range parts() {
		d.Sections = append(d.Sections, p.Section)
	}
	return d
}

// listModes stand for fairlead's own polling mode where that hears events as well.
var listModes = []string{modeBPF, modeList1, modeList3}

// glances are the first table.
var glances = []report.Glance{
	{What: "a TCP port is told, median", Part: "latency", Measure: openMessage},
	{What: "a TCP port is told, 99 of 100", Part: "latency", Measure: openMessage, Stat: report.P99},
	{What: "a UDP port is told, median", Part: "latency", Measure: bindMessage},
	{What: "a client on the host can connect, median", Part: "latency", Measure: openHost},
	{What: "a closed port is withdrawn, median", Part: "latency", Measure: gone},
	{What: "a NAT rule among 1,000 is told, median", Note: "polls: the kernel's dump, iptables-save", Part: "nat", Measure: natMeasure, Size: 1000, Modes: []string{modeBPF, modeDump1, modeSave3}},
	{What: "a container in the guest's network bears its name, median", Part: "engine", Measure: engineHost},
	{What: "a port that a container publishes bears its name, median", Note: "polls: the engine's list", Part: "engine", Measure: enginePublished, Modes: listModes},
	{What: "a Service's node port is told, median", Note: "polls: the list of Services", Part: "kube", Measure: kubeMeasure, Modes: listModes},
	{What: "ports seen that live 10 ms", Part: "missed", Measure: missedMeasure, Size: 10, More: true},
	{What: "ports seen that live 100 ms", Part: "missed", Measure: missedMeasure, Size: 100, More: true},
	{What: "ports seen that live 1 s", Part: "missed", Measure: missedMeasure, Size: 1000, More: true},
	{What: "ports seen that live 5 s", Part: "missed", Measure: missedMeasure, Size: 5000, More: true},
	{What: "idle, no ports: CPU", Part: "idle", Measure: idleCPU},
	{What: "idle, 10,000 ports and rules: CPU", Part: "idle", Measure: idleCPU, Size: 10_000},
	{What: "idle, no ports: context switches", Part: "idle", Measure: idleWake},
	{What: "idle, no ports: memory", Part: "idle", Measure: idleRSS},
	{What: "idle, 10,000 ports and rules: memory", Part: "idle", Measure: idleRSS, Size: 10_000},
	{What: "1 change a second: CPU for each", Part: "churn", Measure: churnCPU, Size: 1},
	{What: "100 changes a second: CPU for each", Part: "churn", Measure: churnCPU, Size: 100},
	{What: "10,000 changes a second: CPU for each", Part: "churn", Measure: churnCPU, Size: 10_000},
	{What: "burst of 2,000 listeners: until all are told", Part: "churn", Measure: burstDone, Size: 2000},
	{What: "burst of 10,000 listeners: CPU in all", Part: "churn", Measure: burstCPU, Size: 10_000},
	{What: "start of the agent: until all ports are told", Part: "start", Measure: startMeasure, Size: 1},
}

// words say what the first table comes to.
func words(r *report.Results) string {
	var out []string
	if a, b, ok := sideBySide(r, "latency", openMessage, 0); ok {
		out = append(out, fmt.Sprintf("Events show a port %s sooner than polling each second, and %s sooner than each three.",
			report.Ratio(b[0], a), report.Ratio(b[1], a)))
	}
	if a, b, ok := sideBySide(r, "idle", idleCPU, 0); ok {
		said := fmt.Sprintf("While nothing happens that takes %s of a core, where polling each second takes %s",
			report.Value(a, "%"), report.Value(b[0], "%"))
		if a, b, ok := sideBySide(r, "idle", idleRSS, 0); ok && a > b[0] {
			said += fmt.Sprintf("; it holds %s more memory", report.Value(a-b[0], "B"))
		}
		out = append(out, said+".")
	}
	if a, b, ok := sideBySide(r, "churn", churnCPU, 10_000); ok && a > b[0] {
		out = append(out, fmt.Sprintf(`The price is CPU while ports come and go by the thousand: an event is handled
at once and told, where a poller sees only what stands at its next look. At 10,000 changes a second
a change costs %s by events and %s by polling, which never sees most of them.`, report.Value(a, "s"), report.Value(b[0], "s")))
	}
	a, okA := r.Cell("start", startMeasure, modeBPF, 1)
	if b, ok := r.Cell("start", startMeasure, modePoll1, 1); ok && okA && a.Value > b.Value {
		out = append(out, fmt.Sprintf("A start takes %s longer, while programs are loaded.", report.Value(a.Value-b.Value, "s")))
	}
	if _, b, ok := sideBySide(r, "missed", missedMeasure, 5000); ok && b[0] >= 99 {
		out = append(out, "For ports that stay for several seconds, where a second or more of waiting does not matter, polling finds the same ports.")
	}
	return strings.Join(out, "\n")
}

// sideBySide returns the figure of bpf and those of the pollers.
func sideBySide(r *report.Results, part, measure string, size float64) (bpf float64, polls [2]float64, ok bool) {
	a, ok := r.Cell(part, measure, modeBPF, size)
	for i, m := range []string{modePoll1, modePoll3} {
		c, found := r.Cell(part, measure, m, size)
		polls[i], ok = c.Value, ok && found
	}
	return a.Value, polls, ok && a.Value > 0
}

// targets are the numbers that fairlead is built to reach.
func targets() []report.Target {
	ref := func(part, measure, mode string, size float64, s report.Stat) report.Ref {
		return report.Ref{Part: part, Measure: measure, Mode: mode, Size: size, Stat: s}
	}
	bpf := func(part, measure string, size float64, s report.Stat) report.Ref {
		return ref(part, measure, modeBPF, size, s)
	}
	splice, direct := ref("flows", toGuest, spliceWay, 0, 0), ref("flows", roundTrip, directWay, 0, 0)
	spliced := ref("flows", roundTrip, spliceWay, 0, 0)
	dumped := ref("emulated", emulatedNAT, modeDump1, 1000, report.P99)
	return []report.Target{
		{Key: "open-p50", What: "listen() returns → message on the link, p50", Ref: bpf("latency", openMessage, 0, report.Median), Limit: 200e-6, Unit: "s"},
		{Key: "open-p99", What: "listen() returns → message on the link, p99", Ref: bpf("latency", openMessage, 0, report.P99), Limit: 2e-3, Unit: "s"},
		{Key: "close-p50", What: "close() returns → withdrawal on the link, p50", Ref: bpf("latency", gone, 0, report.Median), Limit: 200e-6, Unit: "s"},
		{Key: "close-p99", What: "close() returns → withdrawal on the link, p99", Ref: bpf("latency", gone, 0, report.P99), Limit: 2e-3, Unit: "s"},
		{Key: "nat-10", What: "NAT commit → message on the link, p99, 10 rules in the table", Ref: bpf("nat", natMeasure, 10, report.P99), Limit: 5e-3, Unit: "s"},
		{Key: "nat-10000", What: "NAT commit → message on the link, p99, 10,000 rules in the table", Ref: bpf("nat", natMeasure, 10_000, report.P99), Limit: 50e-3, Unit: "s"},
		{Key: "nat-emulated", What: "NAT commit → message on the link, p99, 1,000 rules, by a hook (fentry) in an emulated machine, beside polling each second there", Ref: ref("emulated", emulatedNAT, emulatedHook, 1000, report.P99), Over: &dumped, Limit: 1, Unit: "×"},
		{Key: "hook-unwatched", What: "added to a pair of listen() and close(): namespace not watched", Ref: ref("hook", addedTo(pairs[0].name), hookUnwatched, 0, 0), Limit: 0.1e-6, Unit: "s"},
		{Key: "hook-idle", What: "added to a pair of listen() and close(): watched, idle", Ref: ref("hook", addedTo(pairs[0].name), hookIdle, 0, 0), Limit: 7e-6, Unit: "s"},
		{Key: "hook-burst", What: "added to a pair of listen() and close(): watched, in a burst", Ref: ref("hook", addedTo(pairs[0].name), hookBurst, 0, 0), Limit: 1e-6, Unit: "s"},
		{Key: "idle-wake", What: "idle agent: seconds of a minute in which it wakes up (a timer each 10 s at most)", Ref: bpf("idle", idleAwake, 0, report.Median), Limit: 6, Unit: "per minute"},
		{Key: "idle-cpu", What: "idle agent: CPU", Ref: bpf("idle", idleCPU, 0, report.Median), Limit: 0.02, Unit: "%"},
		{Key: "idle-cpu-10000", What: "idle agent with 10,000 listeners and rules: CPU, as with none", Ref: bpf("idle", idleCPU, 10_000, report.Median), Limit: 0.02, Unit: "%"},
		{Key: "burst-2000", What: "burst of 2,000 listeners, none lost: the last is told", Ref: bpf("churn", burstDone, 2000, report.Median), Limit: 20e-3, Unit: "s"},
		{Key: "burst-10000", What: "burst of 10,000 listeners, none lost: the last is told", Ref: bpf("churn", burstDone, 10_000, report.Median), Limit: 200e-3, Unit: "s"},
		{Key: "burst-cpu-2000", What: "burst of 2,000 listeners: CPU in all", Ref: bpf("churn", burstCPU, 2000, report.Median), Limit: 0.2, Unit: "s"},
		{Key: "burst-cpu-10000", What: "burst of 10,000 listeners: CPU in all", Ref: bpf("churn", burstCPU, 10_000, report.Median), Limit: 1, Unit: "s"},
		{Key: "burst-rss", What: "burst of 10,000 listeners: memory (RSS)", Ref: bpf("churn", burstRSS, 10_000, report.Median), Limit: 48e6, Unit: "B"},
		{Key: "udp", What: "200 short-lived UDP binds a second beside 1,000 listeners: CPU", Ref: bpf("churn", udpCPU, 0, report.Median), Limit: 0.5, Unit: "%"},
		{Key: "rss", What: "idle agent: memory (RSS)", Ref: bpf("idle", idleRSS, 0, report.Median), Limit: 20e6, Unit: "B"},
		{Key: "rss-kube", What: "idle agent with Kubernetes: memory (RSS)", Ref: bpf("kube", kubeRSS, 0, report.Median), Limit: 40e6, Unit: "B"},
		{Key: "binary", What: "binary, stripped", Ref: ref("start", binaryMeasure, "fairlead", 0, 0), Limit: 40e6, Unit: "B"},
		{Key: "start", What: "start of the agent → first sync", Ref: bpf("start", startMeasure, 1, report.Median), Limit: 150e-3, Unit: "s"},
		{Key: "throughput", What: "TCP to the guest through the link, beside the splice", Ref: ref("flows", toGuest, linkWay, 0, 0), Over: &splice, Limit: 0.6, Unit: "×", AtLeast: true},
		{Key: "roundtrip", What: "round trip of 64 bytes through the link, more than through the splice, p50", Ref: ref("flows", roundTrip, linkWay, 0, 0), Minus: &spliced, Limit: 60e-6, Unit: "s"},
		{Key: "roundtrip-direct", What: "round trip of 64 bytes through the link, more than with no relay, p50", Ref: ref("flows", roundTrip, linkWay, 0, 0), Minus: &direct, Limit: 60e-6, Unit: "s"},
	}
}
