// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/fairlead/fairlead/internal/memory"
	"github.com/fairlead/fairlead/internal/port"
)

// AgentSnapshot holds the counters of an agent. They count from its start, except
// those marked "now".
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
	Memory       *memory.Usage    // now; nil if unknown
	Link         *LinkCounts      // nil without a link
	Listener     *ListenerCounts  // nil without that sink
	Inventory    *InventoryCounts // nil unless it is written
}

// SourceState is a key of counters by source.
type SourceState struct {
	Source string
	State  port.State
}

// SinkState is a key of counters by sink.
type SinkState struct {
	Sink  string
	State port.State
}

// SinkCounts counts the syncs of one sink.
type SinkCounts struct {
	Sink                     string
	Syncs, Failures, Retries uint64
}

// ObserverCounts holds the counters of the socket observer.
type ObserverCounts struct {
	Events, Malformed, Drops, Skipped, Resyncs, Drift, Dumps, DumpFailures uint64
	DumpTime                                                               time.Duration
	Sockets                                                                int // now
}

// NATCounts holds the counters of the NAT source.
type NATCounts struct {
	Unsupported                                                     int // rules now
	Commits, Dumps, Failures, LegacyReads, Losses, Drift, Evaluated uint64
}

// ListenerCounts holds the counters of the listener sink.
type ListenerCounts struct {
	Open, Flows                                          int // now
	Opened, Yields, Conflicts, Served, Failed, OverLimit uint64
}

// FlowCounts counts flows and their bytes.
type FlowCounts struct {
	OpenTCP, OpenUDP         int // now
	OK, Refused, Unreachable uint64
	OutOfDescriptors         uint64
	ToGuest, ToHost          uint64 // payload bytes
}

// InventoryCounts holds the counters of the node's object in the Kubernetes API.
type InventoryCounts struct {
	Current          bool // now
	Writes, Failures uint64
	Omitted          int // ports, now
	Policy           *PolicyCounts
}

// PolicyCounts is what the policy of the cluster says of this node.
type PolicyCounts struct {
	Judged     bool // by policy, labels and ports as they are now
	Known      bool // Violations counts by some policy, labels and ports
	Violations int  // ports, now
}

// LinkCounts holds the counters of the link to the host.
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
	anonymous, file                                                                     *Family
	propagation                                                                         *Family
	outcomes, syncs, retries                                                            *Family
	events, drops, skipped, malformed, resyncs, drift, dumps, dumpTime, sockets, method *Family
	unsupported, natReads, natFailures, natLosses, natDrift, natEvaluated               *Family
	open, flows, answers, bytes                                                         *Family
	holds, held, holdFlows, holdEnds                                                    *Family
	inventory, inventoryWrites, inventoryOmitted, policyJudged, policyViolations        *Family
	connected, sessions, closed, messages, control, rejected, asked                     *Family
}

const (
	stateValues  = "`active`, `pending`, `conflict`, `failed`, `denied`"
	sourceValues = "`socket`, `nat`, `docker`, `containerd`, `kube`"
	sinkValues   = "`hostlink`, `listener`, `gvproxy`, `vtunnel`, `none`"
)

func declareAgent() *agentFamilies {
	var f agentFamilies
	state, source, sink := Label{"state", stateValues}, Label{"source", sourceValues}, Label{"sink", sinkValues}
	f.build = f.declareBuild()
	f.anonymous = f.gauge("memory_anonymous_bytes", "Resident memory of the agent's own: heap and stacks.")
	f.file = f.gauge("memory_file_bytes",
		"Resident pages of files, most of them the executable's, which the kernel reclaims when it needs memory.")
	f.publications = f.gauge("publications", "Current publications by state, which is the best of their outcomes.", state)
	f.bySource = f.gauge("source_publications",
		"Current publications by source and state. A publication counts once for each of its sources.", source, state)
	f.changes = f.counter("changes_total", "Changes to the merged table.")
	f.sourceUp = f.gauge("source_up", "1 if the source is live, 0 if it is starting or stale.", source)

	f.propagation = f.add(Histogram, "propagation_seconds",
		"Time from the kernel event to the sink's acknowledgement that the port is active.", sink)

	f.outcomes = f.gauge("outcomes", "Current outcomes by sink and state. There is one per publication, sink and host address.", sink, state)
	f.syncs = f.counter("syncs_total", "Syncs of a sink with the wanted set.", sink, Label{"result", "`ok`, `failed`"})
	f.retries = f.counter("sync_retries_total", "Syncs whose only reason was that the previous one failed.", sink)

	f.events = f.counter("observer_events_total", "Kernel events read.")
	f.drops = f.counter("observer_drops_total", "Kernel events lost; each loss forces a dump.")
	f.skipped = f.counter("observer_skipped_total",
		"The part of observer_drops_total lost because the hook was already running on that CPU. The rest found the ring buffer full.")
	f.malformed = f.counter("observer_malformed_total", "Kernel events that could not be decoded; each forces a dump.")
	f.resyncs = f.counter("observer_resyncs_total", "Dumps forced by a loss.")
	f.drift = f.counter("observer_drift_total", "Sockets that a background dump had to correct.")
	f.dumps = f.counter("observer_dumps_total", "Socket dumps.", Label{"result", "`ok`, `failed`"})
	f.dumpTime = f.counter("observer_dump_seconds_total", "Time spent in socket dumps.")
	f.sockets = f.gauge("observer_sockets", "Currently known sockets.")
	f.method = f.gauge("observer_method_info", "1 for the method that observes each capability.",
		Label{"capability", "`tcp-listen`, `tcp-bind`, `udp-bind`, `udp-connect`, `device`, `udp-dump`, `nftables`, `nft-filter`, `legacy-tables`, `refused-port`"},
		Label{"method", "`fentry`, `kprobe`, `tp_btf`, `tracepoint`, `cgroup`, `nfnetlink`, `poll`, `generation` (polled), `audit`, `iter`, `sock_diag`, `socket`, `none`"})

	f.unsupported = f.gauge("nat_unsupported_rules", "Current NAT rules that forward a port but use an unsupported expression, so they are not published.")
	f.natReads = f.counter("nat_reads_total", "NAT rulesets read, and nftables commits applied.",
		Label{"kind", "`commit` of nftables applied, `dump` of nftables, `legacy` table"})
	f.natFailures = f.counter("nat_read_failures_total", "Failed reads of NAT rules; each is retried.")
	f.natLosses = f.counter("nat_losses_total", "Lost notifications about NAT rules; each loss forces a dump.")
	f.natDrift = f.counter("nat_drift_total", "NAT objects that a background dump had to correct.")
	f.natEvaluated = f.counter("nat_rules_evaluated_total", "NAT rules evaluated.")

	f.open = f.gauge("flows_open", "Currently open flows.", Label{"protocol", "`tcp`, `udp`"})
	f.flows = f.counter("flows_total", "Ended flows by result. Every result except `served` is an error.",
		Label{"result", "`served`, `failed`, `cut`, `lost`, `forbidden`, `limit`, `malformed`, `timeout`"})
	f.answers = f.counter("flow_answers_total", "Replies to the host's flow requests.",
		Label{"result", "`ok`, `refused`, `unreachable`, `descriptors`: too few were left"})
	f.bytes = f.counter("flow_bytes_total", "Payload bytes forwarded.", Label{"direction", "`to_guest`, `to_host`"})

	f.inventory = f.gauge("inventory_current", "1 if the node's object in the Kubernetes API was as it should be at the last look, 0 if it cannot be written.")
	f.inventoryWrites = f.counter("inventory_writes_total", "Writes of the node's object in the Kubernetes API.", Label{"result", "`ok`, `failed`"})
	f.inventoryOmitted = f.gauge("inventory_omitted_ports", "Current ports that the list in the node's object has no room for.")
	f.policyJudged = f.gauge("policy_judged", "1 if the node is judged by its policy (`cluster.policy`) and its labels as they are now, 0 if they or all ports cannot be read; those read last stay in effect.")
	f.policyViolations = f.gauge("policy_violations", "Current ports that are open wider than loopback and that the policy of the node does not allow. Absent while no policy or not all ports could be read even once. Before the labels of the node could be read, those that are sure without them: absent if there are none but other ports wait for labels.")
	f.holds = f.gauge("listener_placeholders", "Currently open placeholders of the listener sink.")
	f.held = f.counter("listener_placeholders_total", "Placeholders by what happened to them.",
		Label{"result", "`opened`, `yielded` to a server that wanted the port, `conflict`: the address was in use"})
	f.holdFlows = f.gauge("listener_flows_open", "Current flows of placeholders.")
	f.holdEnds = f.counter("listener_flows_total", "Flows of placeholders by result.", Label{"result", "`served`, `failed`, `limit`"})

	direction := Label{"direction", "`in`, `out`"}
	f.connected = f.gauge("link_connected", "1 while a host is connected.")
	f.sessions = f.counter("link_sessions_total", "Sessions established with a host.")
	f.closed = f.counter("link_sessions_closed_total", "Sessions that the agent ended.",
		Label{"reason", "`replaced` by a newer host, `silent` host"})
	f.messages = f.counter("link_messages_total", "Control messages by direction.", direction)
	f.control = f.counter("link_bytes_total", "Bytes of control messages by direction.", direction)
	f.rejected = f.counter("link_rejected_total", "Rejected input from a host.",
		Label{"reason", "`malformed` message, `stray` outcome for a key that was never sent"})
	f.asked = f.counter("link_updates_total", "Updates sent to the host, and resyncs it requested.",
		Label{"kind", "`snapshot` sent, `change` sent, `resync` requested"})
	return &f
}

// Agent exports the metrics of an agent.
type Agent struct {
	families *agentFamilies
	read     func() AgentSnapshot
	hist     *prometheus.HistogramVec
	registry *prometheus.Registry
	recent   recent
}

// The propagation histogram has classic buckets, in seconds and dense where most
// values fall, and native ones for a Prometheus that supports them.
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

// Propagated records that sink acknowledged a publication took after the kernel's event.
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
	if s.Memory != nil {
		to.send(f.anonymous, number(s.Memory.Anonymous))
		to.send(f.file, number(s.Memory.File))
	}
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
	to.send(f.answers, number(s.Flows.OutOfDescriptors), "descriptors")
	to.send(f.bytes, number(s.Flows.ToGuest), "to_guest")
	to.send(f.bytes, number(s.Flows.ToHost), "to_host")
	if s.NAT != nil {
		c.nat(to, *s.NAT)
	}
	if s.Listener != nil {
		c.listener(to, *s.Listener)
	}
	if s.Inventory != nil {
		c.inventoried(to, *s.Inventory)
	}
	if s.Link != nil {
		c.link(to, *s.Link)
	}
}

func (c agentCollector) nat(to sender, n NATCounts) {
	f := c.a.families
	to.send(f.unsupported, number(n.Unsupported))
	to.send(f.natReads, number(n.Commits), "commit")
	to.send(f.natReads, number(n.Dumps), "dump")
	to.send(f.natReads, number(n.LegacyReads), "legacy")
	to.send(f.natFailures, number(n.Failures))
	to.send(f.natLosses, number(n.Losses))
	to.send(f.natDrift, number(n.Drift))
	to.send(f.natEvaluated, number(n.Evaluated))
}

func (c agentCollector) inventoried(to sender, i InventoryCounts) {
	f := c.a.families
	to.send(f.inventory, truth(i.Current))
	to.send(f.inventoryWrites, number(i.Writes), "ok")
	to.send(f.inventoryWrites, number(i.Failures), "failed")
	to.send(f.inventoryOmitted, number(i.Omitted))
	if i.Policy == nil {
		return
	}
	to.send(f.policyJudged, truth(i.Policy.Judged))
	if i.Policy.Known {
		to.send(f.policyViolations, number(i.Policy.Violations))
	}
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
