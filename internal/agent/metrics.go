// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/memory"
	"github.com/fairlead/fairlead/internal/metrics"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/reconcile"
	"github.com/fairlead/fairlead/internal/registry"
	"github.com/fairlead/fairlead/internal/sink/listener"
	"github.com/fairlead/fairlead/internal/source/nat"
	"github.com/fairlead/fairlead/internal/table"
)

// propagated records the times from kernel events to the acknowledgement of sink.
func (a *Agent) propagated(sink string, observed []int64) {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return
	}
	for _, at := range observed {
		a.metrics.Propagated(sink, time.Duration(now.Nano()-at))
	}
}

// count collects the counters of all parts.
func (a *Agent) count() metrics.AgentSnapshot {
	s := metrics.AgentSnapshot{Sources: make(map[string]bool), Methods: a.methods()}
	a.countPublications(&s)
	if m, err := memory.Read(); err != nil {
		a.log.Debug("memory unknown", "err", err)
	} else {
		s.Memory = &m
	}
	for name, src := range a.registry.Sources().View().All() {
		s.Sources[name] = src.State == registry.Live
	}
	for _, sink := range a.reconciler.Stats() {
		s.Sinks = append(s.Sinks, metrics.SinkCounts(sink))
	}
	o := a.observer.Stats()
	s.Observer = metrics.ObserverCounts{
		Events: o.Events, Malformed: o.Malformed, Drops: o.Drops, Skipped: o.Skipped, Resyncs: o.Resyncs, Drift: o.Drift,
		Dumps: o.Dumps, DumpFailures: o.DumpFailures, DumpTime: o.DumpTime, Sockets: o.Sockets,
	}
	for _, src := range a.sources {
		if src, ok := src.(interface{ Status() nat.Status }); ok {
			n := src.Status()
			s.NAT = &metrics.NATCounts{
				Unsupported: n.ProblemCount, Commits: n.Commits, Dumps: n.Dumps, Failures: n.Failures,
				LegacyReads: n.LegacyReads, Losses: n.Lost, Drift: n.Drift, Evaluated: n.Evaluated,
			}
		}
	}
	for _, sink := range a.sinks {
		if sink, ok := sink.(interface{ Stats() listener.Stats }); ok {
			l := metrics.ListenerCounts(sink.Stats())
			s.Listener = &l
		}
	}
	if a.inventory != nil {
		i := a.inventory.writer.State()
		s.Inventory = &metrics.InventoryCounts{Current: i.Current, Writes: i.Writes, Failures: i.Fails, Omitted: i.Omitted}
		if v, ok := a.verdict(); ok {
			s.Inventory.Policy = &metrics.PolicyCounts{Judged: v.Error == nil, Known: v.Known, Violations: len(v.Violations)}
		}
	}
	s.Flows = metrics.FlowCounts(a.forward.Stats())
	if a.hostlink != nil {
		l := a.hostlink.Stats()
		s.Link = &metrics.LinkCounts{
			Connected: l.Connected, Sessions: l.Sessions, Replaced: l.Replaced, Silent: l.Silent,
			FramesIn: l.FramesIn, FramesOut: l.FramesOut, BytesIn: l.BytesIn, BytesOut: l.BytesOut,
			Malformed: l.Malformed, Stray: l.Stray, Resyncs: l.Resyncs, Snapshots: l.Snapshots, Changes: l.Changes,
			Flows: l.Flows,
		}
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
func (a *Agent) countPublications(s *metrics.AgentSnapshot) {
	pubs, outs := a.registry.Publications().View(), a.reconciler.Outcomes().View()
	s.Changes = pubs.Generation()
	s.Publications, s.BySource = make(map[port.State]int), make(map[metrics.SourceState]int)
	s.Outcomes = make(map[metrics.SinkState]int)
	for key, p := range pubs.All() {
		reported, _ := outs.Get(key)
		for _, o := range reported {
			s.Outcomes[metrics.SinkState{Sink: o.Sink, State: o.State}]++
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
			if !slices.ContainsFunc(origins[:i], func(p port.OriginInfo) bool { return p.Source == o.Source }) {
				s.BySource[metrics.SourceState{Source: o.Source, State: state}]++
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
