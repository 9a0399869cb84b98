// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/fairlead/fairlead/internal/port"
)

// AgentSnapshot is what an agent counts, as it stands. All counts are since its
// start, but for what is said to be now.
type AgentSnapshot struct {
	Changes      uint64             // of the merged table
	Publications map[port.State]int // now
	BySource     map[SourceState]int
	Sources      map[string]bool // now: whether it is live
	Outcomes     map[SinkState]int
	Sinks        []SinkCounts
	Observer     ObserverCounts
	Methods      map[string]string // now: the method of each capability
	NAT          *NATCounts        // nil where NAT rules are not read
	Flows        FlowCounts
	Link         *LinkCounts     // nil without a link
	Listener     *ListenerCounts // nil without that sink
}

// SourceState is a key of what is counted by source.
type SourceState struct {
	Source string
	State  port.State
}

// SinkState is a key of what is counted by sink.
type SinkState struct {
	Sink  string
	State port.State
}

// SinkCounts is what was asked of one sink.
type SinkCounts struct {
	Sink                     string
	Syncs, Failures, Retries uint64
}

// ObserverCounts is what the observer of sockets did.
type ObserverCounts struct {
	Events, Malformed, Drops, Skipped, Resyncs, Drift, Dumps, DumpFailures uint64
	DumpTime                                                               time.Duration
	Sockets                                                                int // now
}

// NATCounts is what the reader of NAT rules did.
type NATCounts struct {
	NotUnderstood                                                   int // rules now
	Commits, Dumps, Failures, LegacyReads, Losses, Drift, Evaluated uint64
}

// ListenerCounts is what the listener sink did.
type ListenerCounts struct {
	Open, Flows                                          int // now
	Opened, Yields, Conflicts, Served, Failed, OverLimit uint64
}

// FlowCounts is what was carried.
type FlowCounts struct {
	OpenTCP, OpenUDP         int // now
	OK, Refused, Unreachable uint64
	ToGuest, ToHost          uint64 // payload bytes
}

// LinkCounts is what went over the link to the host.
type LinkCounts struct {
	Connected                   bool // now
	Sessions, Replaced, Silent  uint64
	FramesIn, FramesOut         uint64
	BytesIn, BytesOut           uint64
	Malformed, Stray            uint64
	Resyncs, Snapshots, Changes uint64
	Flows                       map[string]uint64 // that ended, by result
}

// agentFamilies declares what an agent exports.
type agentFamilies struct {
	set
	build, publications, bySource, changes, sourceUp                                    *Family
	propagation                                                                         *Family
	outcomes, syncs, retries                                                            *Family
	events, drops, skipped, malformed, resyncs, drift, dumps, dumpTime, sockets, method *Family
	unread, natReads, natFailures, natLosses, natDrift, natEvaluated                    *Family
	open, flows, answers, bytes                                                         *Family
	holds, held, holdFlows, holdEnds                                                    *Family
	connected, sessions, closed, messages, control, rejected, asked                     *Family
}

const (
	stateValues  = "`active`, `pending`, `conflict`, `failed`, `denied`"
	sourceValues = "`socket`, `nat`, `docker`, `containerd`, `kube`"
	sinkValues   = "`hostlink`, `listener`, `gvproxy`, `vtunnel`"
)

func declareAgent() *agentFamilies {
	var f agentFamilies
	state, source, sink := Label{"state", stateValues}, Label{"source", sourceValues}, Label{"sink", sinkValues}
	f.build = f.declareBuild()
	f.publications = f.gauge("publications", "Publications now, by state: the best of what the sinks say.", state)
	f.bySource = f.gauge("source_publications",
		"Publications now, by state and by source; one that several sources see counts for each of them.", source, state)
	f.changes = f.counter("changes_total", "Changes of the merged table.")
	f.sourceUp = f.gauge("source_up", "1 if the source is live, 0 if it has not begun or if what it says may be old.", source)

	f.propagation = f.add(Histogram, "propagation_seconds",
		"Time from the kernel's event to the sink's acknowledgement of an active port.", sink)

	f.outcomes = f.gauge("outcomes", "Outcomes now: what each sink made of a publication at one host address.", sink, state)
	f.syncs = f.counter("syncs_total", "Times that a sink was brought in step.", sink, Label{"result", "`ok`, `failed`"})
	f.retries = f.counter("sync_retries_total", "Syncs for no other reason than that the one before had failed.", sink)

	f.events = f.counter("observer_events_total", "Kernel events read.")
	f.drops = f.counter("observer_drops_total", "Kernel events lost; each loss forces a dump.")
	f.skipped = f.counter("observer_skipped_total",
		"Of the kernel events lost, those whose hook was skipped because it ran on that processor already; for the others there was no room.")
	f.malformed = f.counter("observer_malformed_total", "Kernel events that could not be decoded; each forces a dump.")
	f.resyncs = f.counter("observer_resyncs_total", "Dumps forced by a loss.")
	f.drift = f.counter("observer_drift_total", "Sockets that a background dump had to put right.")
	f.dumps = f.counter("observer_dumps_total", "Socket dumps.", Label{"result", "`ok`, `failed`"})
	f.dumpTime = f.counter("observer_dump_seconds_total", "Time spent in socket dumps.")
	f.sockets = f.gauge("observer_sockets", "Sockets known now.")
	f.method = f.gauge("observer_method_info", "1 for the mechanism that observes each capability.",
		Label{"capability", "`tcp-listen`, `tcp-bind`, `udp-bind`, `udp-connect`, `udp-dump`"},
		Label{"method", "`fentry`, `kprobe`, `tp_btf`, `cgroup`, `poll`, `audit`, `iter`, `sock_diag`"})

	f.unread = f.gauge("nat_not_understood_rules", "NAT rules now that lead to a port, are not understood, and so are not published.")
	f.natReads = f.counter("nat_reads_total", "NAT rulesets that were read or followed.",
		Label{"kind", "`commit` of nftables applied, `dump` of nftables, `legacy` table"})
	f.natFailures = f.counter("nat_read_failures_total", "Reads of NAT rules that failed and were tried again.")
	f.natLosses = f.counter("nat_losses_total", "Gaps in what the kernel told of NAT rules; each forces a dump.")
	f.natDrift = f.counter("nat_drift_total", "Objects of NAT rulesets that a background dump had to put right.")
	f.natEvaluated = f.counter("nat_rules_evaluated_total", "NAT rules worked out.")

	f.open = f.gauge("flows_open", "Flows open now.", Label{"protocol", "`tcp`, `udp`"})
	f.flows = f.counter("flows_total", "Flows that ended; every result but `served` is an error.",
		Label{"result", "`served`, `failed`, `cut`, `lost`, `forbidden`, `limit`, `malformed`, `timeout`"})
	f.answers = f.counter("flow_answers_total", "Answers to the host's requests for a flow.",
		Label{"result", "`ok`, `refused`, `unreachable`"})
	f.bytes = f.counter("flow_bytes_total", "Payload bytes carried.", Label{"direction", "`to_guest`, `to_host`"})

	f.holds = f.gauge("listener_placeholders", "Placeholders of the listener sink open now.")
	f.held = f.counter("listener_placeholders_total", "What became of placeholders.",
		Label{"result", "`opened`, `yielded` to who wanted the port, `conflict`: the address is taken"})
	f.holdFlows = f.gauge("listener_flows_open", "Flows that placeholders serve now.")
	f.holdEnds = f.counter("listener_flows_total", "Flows that came to placeholders.", Label{"result", "`served`, `failed`, `limit`"})

	direction := Label{"direction", "`in`, `out`"}
	f.connected = f.gauge("link_connected", "1 while a host is connected.")
	f.sessions = f.counter("link_sessions_total", "Sessions with a host that began.")
	f.closed = f.counter("link_sessions_closed_total", "Sessions that the agent ended.",
		Label{"reason", "`replaced` by a newer host, `silent` host"})
	f.messages = f.counter("link_messages_total", "Control messages.", direction)
	f.control = f.counter("link_bytes_total", "Bytes of the control streams.", direction)
	f.rejected = f.counter("link_rejected_total", "What a host said and was not taken.",
		Label{"reason", "`malformed` message, `stray` outcome of a key that it was never told"})
	f.asked = f.counter("link_updates_total", "What the host was told, and what it asked for.",
		Label{"kind", "`snapshot` sent, `change` sent, `resync` asked for"})
	return &f
}

// Agent exports what an agent counts.
type Agent struct {
	families *agentFamilies
	read     func() AgentSnapshot
	hist     *prometheus.HistogramVec
	registry *prometheus.Registry
	recent   recent
}

// The propagation histogram has classic buckets for every Prometheus, in seconds
// and close where most values fall, and native ones for those that take them.
var propagationBuckets = []float64{50e-6, 100e-6, 200e-6, 400e-6, 800e-6, 2e-3, 5e-3, 10e-3, 50e-3, 200e-3, 1, 5}

const (
	nativeFactor     = 1.1
	nativeMaxBuckets = 160
	nativeMinReset   = time.Hour
)

// NewAgent returns the metrics of an agent. read is called at each scrape.
func NewAgent(read func() AgentSnapshot) *Agent {
	a := &Agent{families: declareAgent(), read: read}
	f := a.families.propagation
	a.hist = prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name: f.Name, Help: f.Help, Buckets: propagationBuckets,
		NativeHistogramBucketFactor:     nativeFactor,
		NativeHistogramMaxBucketNumber:  nativeMaxBuckets,
		NativeHistogramMinResetDuration: nativeMinReset,
	}, f.labelNames())
	a.registry = newRegistry(a.hist, agentCollector{a})
	return a
}

// Handler answers scrapes.
func (a *Agent) Handler() http.Handler { return handler(a.registry) }

// Propagated notes that sink acknowledged a publication took after the kernel's event.
func (a *Agent) Propagated(sink string, took time.Duration) {
	a.hist.WithLabelValues(sink).Observe(took.Seconds())
	a.recent.add(took)
}

// Recent returns the propagation times since the given count of them, oldest
// first, and the count to ask with the next time. The latest 256 are kept.
func (a *Agent) Recent(since uint64) ([]time.Duration, uint64) { return a.recent.since(since) }

type agentCollector struct{ a *Agent }

func (c agentCollector) Describe(ch chan<- *prometheus.Desc) { c.a.families.Describe(ch) }

func (c agentCollector) Collect(ch chan<- prometheus.Metric) {
	f, s, to := c.a.families, c.a.read(), sender(ch)
	to.build(f.build)
	for _, st := range states {
		to.send(f.publications, number(s.Publications[st]), st.String())
	}
	to.send(f.changes, number(s.Changes))
	for name, up := range s.Sources {
		to.send(f.sourceUp, truth(up), name)
		for _, st := range states {
			to.send(f.bySource, number(s.BySource[SourceState{name, st}]), name, st.String())
		}
	}
	for _, sink := range s.Sinks {
		to.send(f.syncs, number(sink.Syncs), sink.Sink, "ok")
		to.send(f.syncs, number(sink.Failures), sink.Sink, "failed")
		to.send(f.retries, number(sink.Retries), sink.Sink)
		for _, st := range states {
			to.send(f.outcomes, number(s.Outcomes[SinkState{sink.Sink, st}]), sink.Sink, st.String())
		}
	}
	c.observer(to, s)
	to.send(f.open, number(s.Flows.OpenTCP), "tcp")
	to.send(f.open, number(s.Flows.OpenUDP), "udp")
	to.send(f.answers, number(s.Flows.OK), "ok")
	to.send(f.answers, number(s.Flows.Refused), "refused")
	to.send(f.answers, number(s.Flows.Unreachable), "unreachable")
	to.send(f.bytes, number(s.Flows.ToGuest), "to_guest")
	to.send(f.bytes, number(s.Flows.ToHost), "to_host")
	if s.NAT != nil {
		c.nat(to, *s.NAT)
	}
	if s.Listener != nil {
		c.listener(to, *s.Listener)
	}
	if s.Link != nil {
		c.link(to, *s.Link)
	}
}

func (c agentCollector) nat(to sender, n NATCounts) {
	f := c.a.families
	to.send(f.unread, number(n.NotUnderstood))
	to.send(f.natReads, number(n.Commits), "commit")
	to.send(f.natReads, number(n.Dumps), "dump")
	to.send(f.natReads, number(n.LegacyReads), "legacy")
	to.send(f.natFailures, number(n.Failures))
	to.send(f.natLosses, number(n.Losses))
	to.send(f.natDrift, number(n.Drift))
	to.send(f.natEvaluated, number(n.Evaluated))
}

func (c agentCollector) listener(to sender, l ListenerCounts) {
	f := c.a.families
	to.send(f.holds, number(l.Open))
	to.send(f.held, number(l.Opened), "opened")
	to.send(f.held, number(l.Yields), "yielded")
	to.send(f.held, number(l.Conflicts), "conflict")
	to.send(f.holdFlows, number(l.Flows))
	to.send(f.holdEnds, number(l.Served), "served")
	to.send(f.holdEnds, number(l.Failed), "failed")
	to.send(f.holdEnds, number(l.OverLimit), "limit")
}

func (c agentCollector) observer(to sender, s AgentSnapshot) {
	f, o := c.a.families, s.Observer
	to.send(f.events, number(o.Events))
	to.send(f.drops, number(o.Drops))
	to.send(f.skipped, number(o.Skipped))
	to.send(f.malformed, number(o.Malformed))
	to.send(f.resyncs, number(o.Resyncs))
	to.send(f.drift, number(o.Drift))
	to.send(f.dumps, number(o.Dumps), "ok")
	to.send(f.dumps, number(o.DumpFailures), "failed")
	to.send(f.dumpTime, o.DumpTime.Seconds())
	to.send(f.sockets, number(o.Sockets))
	for capability, method := range s.Methods {
		to.send(f.method, 1, capability, method)
	}
}

func (c agentCollector) link(to sender, l LinkCounts) {
	f := c.a.families
	to.send(f.connected, truth(l.Connected))
	to.send(f.sessions, number(l.Sessions))
	to.send(f.closed, number(l.Replaced), "replaced")
	to.send(f.closed, number(l.Silent), "silent")
	to.send(f.messages, number(l.FramesIn), "in")
	to.send(f.messages, number(l.FramesOut), "out")
	to.send(f.control, number(l.BytesIn), "in")
	to.send(f.control, number(l.BytesOut), "out")
	to.send(f.rejected, number(l.Malformed), "malformed")
	to.send(f.rejected, number(l.Stray), "stray")
	to.send(f.asked, number(l.Snapshots), "snapshot")
	to.send(f.asked, number(l.Changes), "change")
	to.send(f.asked, number(l.Resyncs), "resync")
	for result, n := range l.Flows {
		to.send(f.flows, number(n), result)
	}
}

// states is every state, best first.
var states = []port.State{port.Active, port.Pending, port.Conflict, port.Failed, port.Denied}
