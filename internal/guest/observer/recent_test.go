// SPDX-License-Identifier: Apache-2.0

//go:build linux

package observer

import (
	"slices"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/guest/kernel/bpf"
)

// inFlight is a call that a hook has reported, while dumps still show the table as
// it was before.
type inFlight struct {
	name   string
	first  []bpf.SockEvent // earlier calls, which are over
	before []row
	event  bpf.SockEvent
	want   []string
}

func callsInFlight() []inFlight {
	bound := tcpRow(1)
	bound.socket.Listening = false
	bind, listen := tcpEvent(bpf.SockEventKindEVENT_BIND, 1), tcpEvent(bpf.SockEventKindEVENT_LISTEN, 1)
	bindUDP := udpEvent(bpf.SockEventKindEVENT_BIND, 1)
	tcp, tcpBound, udp := []string{"tcp 0.0.0.0:1001"}, []string{"tcp 0.0.0.0:1001 bound"}, []string{"udp 0.0.0.0:1001"}
	return []inFlight{
		{"bind", nil, nil, bind, tcpBound},
		{"listen, as bound", []bpf.SockEvent{bind}, []row{bound}, listen, tcp},
		{"listen, as nothing", []bpf.SockEvent{bind}, nil, listen, tcp},
		{"shutdown, as nothing", []bpf.SockEvent{listen}, nil, tcpEvent(bpf.SockEventKindEVENT_UNLISTEN, 1), tcpBound},
		{"connect", []bpf.SockEvent{bind}, []row{bound}, tcpEvent(bpf.SockEventKindEVENT_CONNECT, 1), nil},
		{"close of a listener", []bpf.SockEvent{listen}, []row{tcpRow(1)}, tcpEvent(bpf.SockEventKindEVENT_CLOSE, 1), nil},
		{"close of a listener, as bound", []bpf.SockEvent{listen}, []row{bound}, tcpEvent(bpf.SockEventKindEVENT_CLOSE, 1), nil},
		{"bind of UDP", nil, nil, bindUDP, udp},
		{"close of UDP", []bpf.SockEvent{bindUDP}, []row{udpRow(1)}, udpEvent(bpf.SockEventKindEVENT_CLOSE, 1), nil},
	}
}

func (k *keeper) describe() []string {
	k.mu.Lock()
	defer k.mu.Unlock()
	var all []string
	for _, s := range k.set {
		all = append(all, describe(s))
	}
	slices.Sort(all)
	return all
}

// TestCallInFlight: the event of a call is read before a dump that does not show the
// call's effect. No later event repairs what that dump gets wrong.
func TestCallInFlight(t *testing.T) {
	for _, c := range callsInFlight() {
		for _, first := range []bool{true, false} {
			name := c.name + ", at an audit"
			if first {
				name = c.name + ", at the start"
			}
			t.Run(name, func(t *testing.T) {
				inBubble(t, func(t *testing.T) {
					r := newRig(c.before...)
					if first {
						r.source.send(append(c.first, c.event)...)
						r.start(t)
					} else {
						r.source.send(c.first...)
						r.start(t)
						pass(firstAudit - time.Millisecond)
						r.source.send(c.event)
						pass(time.Second / 2)
					}
					pass(time.Second / 2)
					if got := r.keeper.describe(); !slices.Equal(got, c.want) {
						t.Errorf("have %q, want %q", got, c.want)
					}
					if n := r.counters.drift.Load(); n != 0 {
						t.Errorf("drift %d", n)
					}
				})
			})
		}
	}
}

// TestEventsBeforeAllHooksAreAttached: what the hooks that were not attached yet would
// have reported, the first dump shows.
func TestEventsBeforeAllHooksAreAttached(t *testing.T) {
	bind := func(e bpf.SockEvent) []bpf.SockEvent { return []bpf.SockEvent{e} }
	for _, c := range []struct {
		name   string
		events []bpf.SockEvent
		bound  bool
		rows   []row
		want   []string
	}{
		{"bind of UDP, then connect", bind(udpEvent(bpf.SockEventKindEVENT_BIND, 1)), true, nil, nil},
		{"close of UDP, which the dump still has", []bpf.SockEvent{
			udpEvent(bpf.SockEventKindEVENT_BIND, 1), udpEvent(bpf.SockEventKindEVENT_CLOSE, 1),
		}, true, []row{udpRow(1)}, nil},
		{"bind of TCP", bind(tcpEvent(bpf.SockEventKindEVENT_BIND, 1)), true, nil, []string{"tcp 0.0.0.0:1001 bound"}},
		{"bind of TCP, where only listeners are seen", bind(tcpEvent(bpf.SockEventKindEVENT_BIND, 1)), false, nil, nil},
		{"listen", bind(tcpEvent(bpf.SockEventKindEVENT_LISTEN, 1)), false, nil, []string{"tcp 0.0.0.0:1001"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				r := newRig(c.rows...)
				r.source.send(c.events...)
				if _, err := r.take(); err != nil {
					t.Fatal(err)
				}
				if err := r.attached(c.bound); err != nil {
					t.Fatal(err)
				}
				r.start(t)
				pass(firstAudit / 2)
				if got := r.keeper.describe(); !slices.Equal(got, c.want) {
					t.Errorf("have %q, want %q", got, c.want)
				}
			})
		})
	}
}

// TestDumpsDecideWhatIsPolled: no event tells that the socket is closed.
func TestDumpsDecideWhatIsPolled(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(tcpRow(1))
		r.polled = scopeTCPBound
		r.start(t)
		pass(boundPolls*r.interval - time.Millisecond)
		r.edit(func() { delete(r.table, 1) })
		r.source.send(tcpEvent(bpf.SockEventKindEVENT_UNLISTEN, 1))
		pass(time.Second / 2)
		r.wantCookies(t)
	})
}

// TestRecentEventsAreBounded: of more events than there is room for, the last count.
func TestRecentEventsAreBounded(t *testing.T) {
	var r recent
	for i := range uint64(maxRecent + 2) {
		r.add(1+i, time.Duration(i))
	}
	seen := make(map[uint64]bool)
	r.each(recentFor, func(cookie uint64) { seen[cookie] = true })
	if len(seen) != maxRecent || seen[2] || !seen[3] {
		t.Errorf("%d events, the second %v, the third %v", len(seen), seen[2], seen[3])
	}
	n := 0
	if r.each(recentFor+5, func(uint64) { n++ }); n != maxRecent+2-5 {
		t.Errorf("%d events of the last second", n)
	}
}
