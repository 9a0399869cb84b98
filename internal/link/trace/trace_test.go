// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"errors"
	"net/netip"
	"strings"
	"sync"
	"testing"

	"github.com/fairlead/fairlead/internal/port"
)

func subject(p port.Protocol, n, host uint16) Subject {
	return Subject{Key: port.Key{Protocol: p, Address: netip.MustParseAddr("127.0.0.1"), Port: n}, HostPort: host, Peer: netip.MustParseAddrPort("127.0.0.1:5")}
}

// drain returns what has been sent.
func drain(s *Subscription) (list []Event) {
	for len(s.events) > 0 {
		list = append(list, <-s.events)
	}
	return list
}

func kinds(list []Event) string {
	var words []string
	for _, e := range list {
		words = append(words, e.Event)
	}
	return strings.Join(words, " ")
}

func TestNobodyTraces(t *testing.T) {
	var h Hub
	for name, f := range map[string]*Flow{"no hub": (*Hub)(nil).Begin(subject(port.TCP, 80, 0)), "no trace": h.Begin(subject(port.TCP, 80, 0))} {
		if f != nil {
			t.Errorf("%s: a flow", name)
		}
		f.Moved(ToGuest, 1, []byte("x"))
		f.End(nil)
	}
	if n := testing.AllocsPerRun(100, func() { h.Begin(Subject{}).Moved(ToHost, 1, nil) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
	s := h.Subscribe(Filter{Port: 80})
	s.Close()
	if h.Begin(subject(port.TCP, 80, 0)) != nil {
		t.Error("a flow after the end of the trace")
	}
}

func TestFilter(t *testing.T) {
	for _, tt := range []struct {
		f    Filter
		s    Subject
		want bool
	}{
		{Filter{Port: 80}, subject(port.TCP, 80, 0), true},
		{Filter{Port: 80}, subject(port.UDP, 80, 8080), true},
		{Filter{Port: 8080}, subject(port.TCP, 80, 8080), true},
		{Filter{Port: 81}, subject(port.TCP, 80, 8080), false},
		{Filter{Port: 80, Protocol: port.UDP}, subject(port.TCP, 80, 0), false},
		{Filter{Port: 80, Protocol: port.UDP}, subject(port.UDP, 80, 0), true},
	} {
		var h Hub
		s := h.Subscribe(tt.f)
		if got := h.Begin(tt.s) != nil; got != tt.want {
			t.Errorf("%+v of %+v: %v", tt.f, tt.s, got)
		}
		s.Close()
	}
}

func TestEvents(t *testing.T) {
	var h Hub
	plain, with := h.Subscribe(Filter{Port: 80}), h.Subscribe(Filter{Port: 80, Hex: 3})
	defer plain.Close()
	defer with.Close()
	f := h.Begin(subject(port.TCP, 80, 0))
	f.Moved(ToGuest, 5, []byte("hello"))
	f.Moved(ToGuest, 5, []byte("again"))
	f.Moved(ToHost, 2, []byte("ok"))
	list := plain.Take()
	if kinds(list) != "open bytes" || list[1].ToGuest != 10 || list[1].ToHost != 2 {
		t.Errorf("%+v", list)
	}
	if got := plain.Take(); len(got) != 0 {
		t.Errorf("taken again %+v", got)
	}
	f.End(errors.New("denied"))
	list = append(list[:1], drain(plain)...)
	if kinds(list) != "open close" || list[1].Reason != "denied" || list[1].ToGuest != 10 || list[0].Flow != list[1].Flow {
		t.Errorf("%+v", list)
	}
	list = with.Take()
	if kinds(list) != "open payload payload close" || list[1].Payload != "68656c" || list[1].Sent != "client" || list[2].Payload != "6f6b" || list[2].Sent != "server" {
		t.Errorf("%+v", list)
	}
	for _, e := range drain(plain) {
		if e.Payload != "" {
			t.Error("payload without being asked for")
		}
	}
}

// A reader that is slow loses events and is told; flows wait for nobody.
func TestSlowReader(t *testing.T) {
	var h Hub
	s := h.Subscribe(Filter{Port: 80})
	defer s.Close()
	for range queueLength {
		h.Begin(subject(port.TCP, 80, 0)).End(nil)
	}
	got := s.Take()
	if n := len(got) - 1; n != queueLength || got[n].Event != Dropped || got[n].Dropped != queueLength {
		t.Errorf("%d events, the last is %+v", len(got), got[n])
	}
	if len(s.flows) != 0 {
		t.Errorf("%d flows are kept", len(s.flows))
	}
}

// No event about the bytes of a flow is before its first or after its last one.
func TestOrderOfEvents(t *testing.T) {
	const flows = 2000
	var h Hub
	s := h.Subscribe(Filter{Port: 80})
	defer s.Close()
	room := make(chan struct{}, queueLength/4) // so that none is dropped
	var wg sync.WaitGroup
	wg.Go(func() {
		for range flows {
			room <- struct{}{}
			f := h.Begin(subject(port.TCP, 80, 0))
			f.Moved(ToGuest, 1, nil)
			f.End(nil)
		}
	})
	last := make(map[uint64]string)
	for ended := 0; ended < flows; {
		for _, e := range s.Take() {
			if before := last[e.Flow]; before == "" && e.Event != Open || before == Close {
				t.Errorf("flow %d: %s after %q", e.Flow, e.Event, before)
			}
			last[e.Flow] = e.Event
			if e.Event == Close {
				ended++
				<-room
			}
		}
	}
	wg.Wait()
}
