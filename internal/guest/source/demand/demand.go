// SPDX-License-Identifier: Apache-2.0

// Package demand is the source of ports that nobody published and that somebody asks for by
// name: of a container, or of a Service of Kubernetes. It joins what is asked for with what
// the engines know, and dials the address that the engine gave.
package demand

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fairlead/fairlead/internal/guest/netwatch"
	"github.com/fairlead/fairlead/internal/guest/registry"
	"github.com/fairlead/fairlead/internal/guest/source/engine"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/schedule"
	"github.com/fairlead/fairlead/internal/port/table"
)

// Directory knows the containers or the Services of one engine.
type Directory interface {
	// Find returns those that a demand names, at once.
	Find(d port.Demand) []engine.Found
	// Watch returns a signal that is notified after what Find returns has changed. It is
	// called once.
	Watch() schedule.Signal
}

// Sleeper is a Directory whose engine is left alone while nobody needs it.
type Sleeper interface {
	// Need says whether somebody asks for a container by its name.
	Need(is bool)
}

// Max is how many demands there are at most; further ones wait.
const Max = 256

// share bounds the time that is spent on looking up names, to one part in so many: each change
// of an engine may be a reason.
const share = 50

// Options configures a Source. All but Await are required.
type Options struct {
	// Directories are asked. With none all demands wait, and there is nothing to Run.
	Directories []Directory
	// Await, if not nil, returns when the engines have been read for the first time, or failed.
	Await func(ctx context.Context)
	// Kind tells what an address is; netwatch.Classify.
	Kind   func(netip.Addr) (netwatch.Kind, error)
	Logger *slog.Logger
}

// State is what became of a demand.
type State struct {
	port.Demand

	Reason port.Reason // why it waits, none if its port is reported
}

// Waiting is a demand whose port is not reported.
type Waiting struct {
	State

	Since time.Time // when it was first known to wait
}

// Source reports the ports that are asked for.
type Source struct {
	o       Options
	wake    schedule.Signal
	waiting *table.Table[string, Waiting] // by the texts of demands

	mu     sync.Mutex
	asked  []port.Demand // sorted by text
	states []State       // by demand, sorted by text

	// reporting is held over a report, so that Drop withdraws what is reported last. It is
	// locked before mu.
	reporting sync.Mutex
	feed      registry.Feed  // nil unless Run has reported
	complete  bool           // feed has a complete set
	reported  []port.Binding // what feed has
}

// New returns a source without demands. It starts nothing.
func New(o Options) (*Source, error) {
	if o.Kind == nil || o.Logger == nil {
		return nil, errors.New("demand: Kind and Logger are required")
	}
	return &Source{o: o, wake: schedule.NewSignal(), waiting: table.New[string, Waiting](strings.Compare)}, nil
}

// Name returns the name that the registry knows the source by.
func (s *Source) Name() string { return port.SourceDemand }

// Ask replaces what is asked for, each once, which may be nothing.
func (s *Source) Ask(list []port.Demand) {
	list = slices.SortedFunc(slices.Values(list), func(a, b port.Demand) int { return strings.Compare(a.String(), b.String()) })
	s.mu.Lock()
	defer s.mu.Unlock()
	if slices.Equal(s.asked, list) {
		return
	}
	s.asked = list
	if len(s.o.Directories) == 0 {
		var states []State
		for _, d := range list {
			states = append(states, State{d, port.Because(port.NoDirectory)})
		}
		s.note(states)
		return
	}
	s.wake.Notify()
}

// Drop ends what is asked for and is not in list. When it returns, that is withdrawn.
func (s *Source) Drop(list []port.Demand) {
	s.mu.Lock()
	left := slices.DeleteFunc(slices.Clone(s.asked), func(d port.Demand) bool { return !slices.Contains(list, d) })
	s.mu.Unlock()
	s.Ask(left)
	s.reporting.Lock()
	defer s.reporting.Unlock()
	if s.feed != nil {
		s.replace(s.reported)
	}
}

// report reports what was found, until Run ends. An unsure set is not complete, unless one was
// reported before.
func (s *Source) report(feed registry.Feed, set []port.Binding, unsure bool) {
	s.reporting.Lock()
	defer s.reporting.Unlock()
	s.feed, s.complete = feed, s.complete || !unsure
	s.replace(set)
}

// replace reports what of a set is asked for still. s.reporting is held.
func (s *Source) replace(set []port.Binding) {
	s.mu.Lock()
	asked := make(map[string]bool)
	for _, d := range s.asked {
		asked[d.String()] = true
	}
	s.mu.Unlock()
	before := s.reported
	s.reported = slices.DeleteFunc(slices.Clone(set), func(b port.Binding) bool { return !asked[strings.TrimSuffix(b.Origin.ID, endpoints)] })
	if s.complete {
		// The whole set: it is small, and what is equal costs the registry little.
		s.feed.Replace(s.reported)
		return
	}
	change := port.Change{Put: s.reported}
	for _, b := range before {
		if !slices.ContainsFunc(s.reported, func(c port.Binding) bool { return c.Origin == b.Origin }) {
			change.Drop = append(change.Drop, b.Origin)
		}
	}
	s.feed.Apply(change)
}

// endpoints ends the id of the origin that has the endpoints of a Service, behind the demand.
const endpoints = " endpoints"

// Waiting returns the table of what waits, by the texts of demands.
func (s *Source) Waiting() *table.Table[string, Waiting] { return s.waiting }

// Run reports until ctx ends, and returns ctx's cause then.
func (s *Source) Run(ctx context.Context, feed registry.Feed) error {
	var running sync.WaitGroup
	defer running.Wait()
	defer func() {
		s.reporting.Lock()
		defer s.reporting.Unlock()
		s.feed, s.complete, s.reported = nil, false, nil
	}()
	for _, d := range s.o.Directories {
		changes := d.Watch()
		running.Go(func() {
			for schedule.Wait(ctx, time.Time{}, changes) == nil {
				s.wake.Notify()
			}
		})
	}
	feed.Method("by name, at the engine's address")
	s.mu.Lock()
	asked := len(s.asked) > 0
	s.mu.Unlock()
	if !asked {
		s.report(feed, nil, false)
	}
	// What the engines have not told yet is no reason to withdraw what an earlier agent
	// published, nor to say that it is not there.
	var read atomic.Bool
	running.Go(func() {
		if s.o.Await != nil {
			s.o.Await(ctx)
		}
		read.Store(ctx.Err() == nil)
		s.wake.Notify()
	})
	for {
		began := time.Now()
		set, unsure := s.lookUp(read.Load())
		s.report(feed, set, unsure)
		if schedule.Sleep(ctx, schedule.Rest(time.Since(began), share)) != nil ||
			schedule.Wait(ctx, time.Time{}, s.wake) != nil {
			return context.Cause(ctx)
		}
	}
}

// lookUp returns the bindings of all demands, and notes their states. Before the engines are read,
// what is not found is unsure, and has no state; nor has a pod, of which only its runtime knows the
// labels that rules may name.
func (s *Source) lookUp(read bool) (set []port.Binding, unsure bool) {
	s.mu.Lock()
	demands := s.asked
	s.mu.Unlock()
	containers := slices.ContainsFunc(demands, func(d port.Demand) bool { return !d.Service })
	for _, d := range s.o.Directories {
		if e, ok := d.(Sleeper); ok {
			e.Need(containers)
		}
	}
	var states []State
	for i, d := range demands {
		found, reason := []port.Binding(nil), port.Because(port.TooManyDemands, strconv.Itoa(Max))
		if i < Max {
			found, reason = s.find(d)
			if !read && (len(found) == 0 || !d.Service && found[0].Owner.Namespace != "") {
				unsure = true
				continue
			}
		}
		set, states = append(set, found...), append(states, State{d, reason})
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.note(states)
	return set, unsure
}

// note takes the states of all demands. s.mu is held.
func (s *Source) note(states []State) {
	if slices.Equal(states, s.states) {
		return
	}
	for _, st := range states {
		if !slices.Contains(s.states, st) {
			s.o.Logger.Info("a port is asked for by name", "demand", st.Demand.String(), "waits", cmp.Or(st.Reason.String(), "no"))
		}
	}
	s.states = states
	s.list(states)
}

// list makes the table of what waits.
func (s *Source) list(states []State) {
	before := s.waiting.View()
	s.waiting.Update(func(tx *table.Tx[string, Waiting]) {
		waits := make(map[string]bool)
		for _, st := range states {
			text := st.Demand.String()
			old, had := before.Get(text)
			switch waits[text] = !st.Reason.IsZero(); {
			case !waits[text] || had && old.State == st:
			case had:
				tx.Put(text, Waiting{st, old.Since})
			default:
				tx.Put(text, Waiting{st, time.Now()})
			}
		}
		for text := range before.All() {
			if !waits[text] {
				tx.Delete(text)
			}
		}
	})
}

// find returns the bindings of a demand, or why there are none.
func (s *Source) find(d port.Demand) (set []port.Binding, reason port.Reason) {
	var found []engine.Found
	for _, dir := range s.o.Directories {
		for _, f := range dir.Find(d) {
			found = engine.AppendFound(found, f)
		}
	}
	switch {
	case len(found) == 0:
		return nil, missing(d)
	case len(found) > 1:
		return nil, several(d, found)
	case !found[0].Reason.IsZero():
		return nil, found[0].Reason
	}
	f := found[0]
	dial := f.Dial
	if !d.Service {
		if dial = slices.DeleteFunc(slices.Clone(dial), func(a netip.AddrPort) bool { return !s.alone(a.Addr()) }); len(dial) == 0 {
			return nil, port.Because(port.NoOwnAddress, f.Owner.Name, d.Slot.String())
		}
	}
	slices.SortStableFunc(dial, func(a, b netip.AddrPort) int { return family(a) - family(b) })
	b := port.Binding{
		Key:    port.Key{Protocol: d.Protocol, Address: dial[0].Addr(), Port: d.Port},
		Origin: port.Origin{Source: port.SourceDemand, ID: d.String()},
		Owner:  f.Owner, Dial: dial,
		Detail: port.NewDetail("asked for as " + d.String()),
	}
	if !d.Service {
		b.Hints.Targets = dial // where two engines name different owners, rules wait
		return []port.Binding{b}, port.Reason{}
	}
	set = []port.Binding{b}
	if len(f.Targets) > 0 { // rules that deny a pod hold for a Service that leads to it
		b.Origin.ID += endpoints
		b.Owner, b.Hints.Targets = port.Owner{}, f.Targets
		b.Detail = port.NewDetail("endpoints of " + d.String())
		set = append(set, b)
	}
	return set, port.Reason{}
}

// family orders IPv4 before IPv6.
func family(a netip.AddrPort) int {
	if a.Addr().Is4() {
		return 0
	}
	return 1
}

// alone reports whether an address can be a container's alone: not this machine's, nor one
// that is no single machine's. What cannot be looked up counts as this machine's.
func (s *Source) alone(a netip.Addr) bool {
	if !a.IsValid() || a.IsUnspecified() || a.IsLoopback() || a.IsMulticast() || a.IsLinkLocalUnicast() {
		return false
	}
	kind, err := s.o.Kind(a)
	if err != nil {
		s.o.Logger.Debug("cannot ask whose address it is; taking it for this machine's", "address", a, "err", err)
	}
	return err == nil && kind == netwatch.Elsewhere
}

// missing is why a demand waits that names nothing.
func missing(d port.Demand) port.Reason {
	switch {
	case d.Service:
		return port.Because(port.NoService, d.Scope, d.Name)
	case d.Scope != "":
		return port.Because(port.NoContainerOf, d.Name, d.Scope)
	}
	return port.Because(port.NoContainer, d.Name)
}

// several is why a demand waits that names more than one.
func several(d port.Demand, found []engine.Found) port.Reason {
	var list []string
	for _, f := range found {
		name := f.Owner.Name
		if f.Owner.Namespace != "" {
			name = f.Owner.Namespace + "/" + name
			if f.Owner.Cluster != "" {
				name += " of cluster " + f.Owner.Cluster
			}
		} else if name == d.Name {
			name += " (" + f.Owner.ID[:min(12, len(f.Owner.ID))] + ")"
		}
		list = append(list, name)
	}
	slices.Sort(list)
	n := len(list)
	if most := 8; n > most {
		list = append(list[:most], fmt.Sprintf("%d more", n-most))
	}
	if d.Service {
		return port.Because(port.ServiceAmbiguous, d.Owner(), strconv.Itoa(n), strings.Join(list, ", "))
	}
	return port.Because(port.NameAmbiguous, d.Owner(), strconv.Itoa(n), strings.Join(list, ", "))
}
