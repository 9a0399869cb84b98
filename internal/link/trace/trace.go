// SPDX-License-Identifier: Apache-2.0

// Package trace reports single flows to whoever debugs one port: when they open, the
// bytes that they move, and why they end. It costs nothing while nobody traces.
package trace

import (
	"context"
	"encoding/hex"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fairlead/fairlead/internal/port"
)

// MaxHex is how many bytes of payload a trace can show of each direction of a flow.
const MaxHex = 1024

// queueLength is how many events wait for a slow reader before some are dropped.
const queueLength = 1024

// The kinds of an Event.
const (
	Open    = "open"
	Bytes   = "bytes"   // the counts changed
	Payload = "payload" // the first bytes of one direction
	Close   = "close"
	Dropped = "dropped" // events were lost, as they were read too slowly
)

// Event is something that happened to a flow.
type Event struct {
	Time     time.Time      `json:"time"`
	Event    string         `json:"event"`
	Flow     uint64         `json:"flow,omitempty"` // number of the flow in this process
	Protocol string         `json:"protocol,omitempty"`
	Address  string         `json:"address,omitempty"` // of the publication in the guest
	Port     uint16         `json:"port,omitempty"`
	Guest    string         `json:"guest,omitempty"` // on a host
	Peer     netip.AddrPort `json:"peer,omitzero"`   // the client
	ToGuest  uint64         `json:"toGuest"`         // bytes so far
	ToHost   uint64         `json:"toHost"`
	Reason   string         `json:"reason,omitempty"`  // of the close; it may hold text of the peer
	Sent     string         `json:"sent,omitempty"`    // of payload: by the "client" or by the "server"
	Payload  string         `json:"payload,omitempty"` // in hexadecimal
	Dropped  uint64         `json:"dropped,omitempty"` // events
}

// Filter chooses flows.
type Filter struct {
	Port     uint16        // of the publication, or of the host
	Protocol port.Protocol // the zero value is any
	Hex      int           // bytes of payload to show of each direction, up to MaxHex
}

// Subject describes a flow.
type Subject struct {
	Key      port.Key // of the publication
	HostPort uint16   // where the client connected; 0 if that is not known
	Guest    string
	Peer     netip.AddrPort
}

func (f Filter) matches(s Subject) bool {
	return (f.Port == s.Key.Port || f.Port == s.HostPort) && (f.Protocol == 0 || f.Protocol == s.Key.Protocol)
}

// Hub joins flows with those who trace. The zero Hub and a nil one are ready to use.
type Hub struct {
	active atomic.Int64 // subscriptions
	next   atomic.Uint64

	mu   sync.Mutex
	subs map[*Subscription]struct{}
}

// Subscription receives the events of flows that begin after it.
type Subscription struct {
	hub     *Hub
	filter  Filter
	events  chan Event
	dropped atomic.Uint64

	mu    sync.Mutex
	flows map[*Flow]uint64 // that are open, with the bytes that were last reported
}

// Subscribe begins a trace. Close must be called.
func (h *Hub) Subscribe(f Filter) *Subscription {
	s := &Subscription{hub: h, filter: f, events: make(chan Event, queueLength), flows: make(map[*Flow]uint64)}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.subs == nil {
		h.subs = make(map[*Subscription]struct{})
	}
	h.subs[s] = struct{}{}
	h.active.Add(1)
	return s
}

// Close ends the trace. It must be called once.
func (s *Subscription) Close() {
	s.hub.mu.Lock()
	defer s.hub.mu.Unlock()
	delete(s.hub.subs, s)
	s.hub.active.Add(-1)
}

// C returns the events. It and Take have one reader.
func (s *Subscription) C() <-chan Event { return s.events }

// Take returns the events that wait, then one for each open flow that has moved bytes since
// the last call, and one if events were dropped.
func (s *Subscription) Take() (list []Event) {
	s.mu.Lock() // so that no event about bytes overtakes the flow's first event, or its last
	defer s.mu.Unlock()
	for n := len(s.events); n > 0; n-- {
		list = append(list, <-s.events)
	}
	for f, before := range s.flows {
		if n := f.moved[0].Load() + f.moved[1].Load(); n != before {
			s.flows[f] = n
			list = append(list, f.event(Bytes))
		}
	}
	if n := s.dropped.Swap(0); n > 0 {
		list = append(list, Event{Time: time.Now().UTC(), Event: Dropped, Dropped: n})
	}
	return list
}

func (s *Subscription) send(e Event) {
	select {
	case s.events <- e:
	default:
		s.dropped.Add(1)
	}
}

// Flow is one flow that is traced. A nil Flow does nothing.
type Flow struct {
	Subject
	number uint64
	subs   []*Subscription
	moved  [2]atomic.Uint64 // by Direction

	mu    sync.Mutex
	shown [2]bool // payload, by Direction
	most  int     // bytes of payload that somebody wants
}

// Direction is where bytes go.
type Direction int

// The directions.
const (
	ToGuest Direction = iota
	ToHost
)

// Begin reports a flow to those who trace it; nil if nobody does.
func (h *Hub) Begin(s Subject) *Flow {
	if h == nil || h.active.Load() == 0 {
		return nil
	}
	f := &Flow{Subject: s, number: h.next.Add(1)}
	h.mu.Lock()
	for sub := range h.subs {
		if sub.filter.matches(s) {
			f.subs = append(f.subs, sub)
			f.most = max(f.most, sub.filter.Hex)
		}
	}
	h.mu.Unlock()
	if f.subs == nil {
		return nil
	}
	for _, sub := range f.subs {
		sub.mu.Lock()
		sub.flows[f] = 0
		sub.send(f.event(Open))
		sub.mu.Unlock()
	}
	return f
}

// Moved counts bytes, the first of which are b; b may be nil.
func (f *Flow) Moved(d Direction, n int, b []byte) {
	if f == nil || n == 0 {
		return
	}
	first := f.moved[d].Add(uint64(n)) == uint64(n)
	if !first || f.most == 0 || len(b) == 0 {
		return
	}
	f.mu.Lock()
	shown := f.shown[d]
	f.shown[d] = true
	f.mu.Unlock()
	if shown {
		return
	}
	for _, sub := range f.subs {
		if most := min(sub.filter.Hex, len(b)); most > 0 {
			e := f.event(Payload)
			e.Sent, e.Payload = [2]string{"client", "server"}[d], hex.EncodeToString(b[:most])
			sub.send(e)
		}
	}
}

// End reports the end of a flow, with nil for an orderly one.
func (f *Flow) End(err error) {
	if f == nil {
		return
	}
	e := f.event(Close)
	e.Reason = "closed by both sides"
	if err != nil {
		e.Reason = err.Error()
	}
	for _, sub := range f.subs {
		sub.mu.Lock()
		delete(sub.flows, f)
		sub.mu.Unlock()
		sub.send(e)
	}
}

func (f *Flow) event(kind string) Event {
	return Event{
		Time: time.Now().UTC(), Event: kind, Flow: f.number, Protocol: f.Key.Protocol.String(), Address: f.Key.Address.String(), Port: f.Key.Port,
		Guest: f.Guest, Peer: f.Peer, ToGuest: f.moved[ToGuest].Load(), ToHost: f.moved[ToHost].Load(),
	}
}

type flowKey struct{}

// With returns a context that carries a flow.
func With(ctx context.Context, f *Flow) context.Context {
	if f == nil {
		return ctx
	}
	return context.WithValue(ctx, flowKey{}, f)
}

// From returns the flow that ctx carries, nil if there is none.
func From(ctx context.Context) *Flow {
	f, _ := ctx.Value(flowKey{}).(*Flow)
	return f
}
