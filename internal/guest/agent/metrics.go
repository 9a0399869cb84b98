// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/config/memory"
	"github.com/fairlead/fairlead/internal/guest/observer"
	"github.com/fairlead/fairlead/internal/guest/reconcile"
	"github.com/fairlead/fairlead/internal/guest/registry"
	"github.com/fairlead/fairlead/internal/guest/sink/hostlink"
	"github.com/fairlead/fairlead/internal/guest/sink/listener"
	"github.com/fairlead/fairlead/internal/guest/source/nat"
	"github.com/fairlead/fairlead/internal/link/forward"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/table"
	"github.com/fairlead/fairlead/internal/status/inventory"
	"github.com/fairlead/fairlead/internal/status/metrics"
)

// Counters are what an agent exports to Prometheus. They count from its start.
type Counters struct {
	Memory       *memory.Usage        `metric:"*"` // nil if unknown
	Publications map[port.State]int   `metric:"publications" label:"state=active; pending; conflict; failed; denied" help:"Current publications by state, which is the best of their outcomes."`
	Changes      uint64               `metric:"changes_total" help:"Changes to the merged table."`
	Sources      []SourceCounters     `metric:"*"`
	Propagation  *metrics.Propagation `metric:"*"`
	Sinks        []SinkCounters       `metric:"*"`
	Observer     observer.Stats       `metric:"*"`
	Methods      map[string]string    `metric:"observer_method_info" label:"capability=tcp-listen; tcp-bind; udp-bind; udp-connect; device; owner-name; udp-dump; nftables; nft-filter; legacy-tables; refused-port" value:"method=fentry; kprobe; tp_btf; tracepoint; cgroup; nfnetlink; poll; generation (polled); audit; iter; sock_diag; socket; none" help:"1 for the method that observes each capability."`
	NAT          *nat.Status          `metric:"*"` // nil where NAT rules are not read
	Flows        forward.Stats        `metric:"*"`
	Inventory    *inventory.State     `metric:"*"` // nil unless it is written
	Judged       *bool                `metric:"policy_judged" help:"1 if the node is judged by its policy (\x60cluster.policy\x60) and its labels as they are now, 0 if they or all ports cannot be read; those read last stay in effect."`
	Violations   *int                 `metric:"policy_violations" help:"Current ports that are open wider than loopback and that the policy of the node does not allow. Absent while no policy or not all ports could be read even once. Before the labels of the node could be read, those that are sure without them: absent if there are none but other ports wait for labels."`
	Listener     *listener.Stats      `metric:"*"` // nil without that sink
	Link         *hostlink.Stats      `metric:"*"` // nil without a link
}

// SourceCounters are those of one source.
type SourceCounters struct {
	Source       string             `label:"source=socket; nat; docker; containerd; kube"`
	Publications map[port.State]int `metric:"source_publications" label:"state" help:"Current publications by source and state. A publication counts once for each of its sources."`
	Live         bool               `metric:"source_up" help:"1 if the source is live, 0 if it is starting or stale."`
}

// SinkCounters are those of one sink.
type SinkCounters struct {
	Sink     string              `label:"sink"`
	Outcomes map[port.State]int  `metric:"outcomes" label:"state" help:"Current outcomes by sink and state. There is one per publication, sink and host address."`
	Syncs    reconcile.SinkStats `metric:"*"`
}

// propagated records the times from kernel events to the acknowledgement of sink.
func (a *Agent) propagated(sink string, observed []int64) {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return
	}
	for _, at := range observed {
		a.propagation.Add(sink, time.Duration(now.Nano()-at))
	}
}

// count collects the counters of all parts.
func (a *Agent) count() Counters {
	s := Counters{
		Propagation: a.propagation, Observer: a.observer.Stats(), Methods: a.methods(), Flows: a.forward.Stats(),
	}
	a.countPublications(&s)
	if m, err := memory.Read(); err != nil {
		a.log.Debug("memory unknown", "err", err)
	} else {
		s.Memory = &m
	}
	for _, src := range a.sources {
		if src, ok := src.(interface{ Status() nat.Status }); ok {
			n := src.Status()
			s.NAT = &n
		}
	}
	for _, sink := range a.sinks {
		if sink, ok := sink.(interface{ Stats() listener.Stats }); ok {
			l := sink.Stats()
			s.Listener = &l
		}
	}
	if a.inventory != nil {
		i := a.inventory.writer.State()
		s.Inventory = &i
	}
	if v, ok := a.verdict(); ok {
		judged, violations := v.Error == nil, len(v.Violations)
		s.Judged = &judged
		if v.Known {
			s.Violations = &violations
		}
	}
	if a.hostlink != nil {
		l := a.hostlink.Stats()
		s.Link = &l
	}
	return s
}

// methods returns the method by which each capability is observed now.
func (a *Agent) methods() map[string]string {
	used := make(map[string]string)
	for _, m := range a.observer.Methods() {
		used[m.Capability] = m.Name
	}
	for _, h := range a.hooked() {
		for _, m := range h.Hooks() {
			used[m.Capability] = m.Name
		}
	}
	for _, src := range a.sources {
		if src, ok := src.(interface{ Status() nat.Status }); ok {
			if m := src.Status().Method; m != "" {
				used["nftables"] = m
			}
		}
	}
	return used
}

// countPublications counts publications and outcomes by state.
func (a *Agent) countPublications(s *Counters) {
	pubs, outs := a.registry.Publications().View(), a.reconciler.Outcomes().View()
	bySource, bySink := make(map[string]map[port.State]int), make(map[string]map[port.State]int)
	for name, src := range a.registry.Sources().View().All() {
		bySource[name] = port.NoneByState()
		s.Sources = append(s.Sources, SourceCounters{Source: name, Publications: bySource[name], Live: src.State == registry.Live})
	}
	for _, sink := range a.reconciler.Stats() {
		bySink[sink.Sink] = port.NoneByState()
		s.Sinks = append(s.Sinks, SinkCounters{Sink: sink.Sink, Outcomes: bySink[sink.Sink], Syncs: sink})
	}
	s.Changes, s.Publications = pubs.Generation(), port.NoneByState()
	for key, p := range pubs.All() {
		reported, _ := outs.Get(key)
		for _, o := range reported {
			if counts := bySink[o.Sink]; counts != nil {
				counts[o.State]++
			}
		}
		state, origins := stateOf(p, outs), p.Origins
		if q, ok := otherFamily(pubs, p); ok {
			if key.Address.Is6() {
				continue // its port was counted
			}
			state, origins = max(state, stateOf(q, outs)), slices.Concat(origins, q.Origins)
		}
		s.Publications[state]++
		for i, o := range origins {
			seen := slices.ContainsFunc(origins[:i], func(p port.OriginInfo) bool { return p.Source == o.Source })
			if counts := bySource[o.Source]; counts != nil && !seen {
				counts[state]++
			}
		}
	}
}

// stateOf is the best of the outcomes of a publication.
func stateOf(p port.Publication, outs table.View[port.Key, reconcile.Outcomes]) port.State {
	if !p.Decision.Allow && !p.Decision.Pending() {
		return port.Denied
	}
	state := port.Pending
	reported, _ := outs.Get(p.Key)
	for i, o := range reported {
		if i == 0 || o.State > state {
			state = o.State
		}
	}
	return state
}

// otherFamily returns what the owner of a publication has in the other family: both are one port.
func otherFamily(pubs table.View[port.Key, port.Publication], p port.Publication) (port.Publication, bool) {
	k, ok := p.Key.OtherFamily()
	if !ok {
		return port.Publication{}, false
	}
	q, ok := pubs.Get(k)
	return q, ok && q.Owner.Same(p.Owner)
}
