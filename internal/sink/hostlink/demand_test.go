// SPDX-License-Identifier: Apache-2.0

package hostlink

import (
	"fmt"
	"slices"
	"testing"

	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/schedule"
	"github.com/fairlead/fairlead/internal/wire"
)

// demanding is a session with a host that asks for ports by name.
type demanding struct{ link.Session }

func (s demanding) Peer() link.Peer {
	p := s.Session.Peer()
	p.Demand = true
	return p
}

func askedFor(texts ...string) wire.Control {
	return wire.Control{Demand: &wire.Demand{Ports: texts}}
}

// What a host asks for is passed on, and why it waits is answered. Another host that does not
// know the message asks for nothing.
func TestDemandOfTheHost(t *testing.T) {
	asked, changed := make(chan string, 8), schedule.NewSignal()
	r := newRig(t, func(o *Options) {
		o.Demand = func(list []port.Demand) { asked <- fmt.Sprint(list) }
		o.Demands = func() []wire.Waiting { return []wire.Waiting{{Port: "web:80/tcp", Reason: "no container"}} }
		o.DemandsChanged = changed
	})
	p := r.connectAs("h", func(s link.Session) link.Session { return demanding{s} })
	if got := <-asked; got != "[]" {
		t.Errorf("asks for %s before it said so", got)
	}
	p.say(askedFor("web:80", "svc/default/web:80/udp"))
	if got := <-asked; got != "[web:80/tcp svc/default/web:80/udp]" {
		t.Error(got)
	}
	if m := p.next().Demanded; m == nil || len(m.Waiting) != 1 || m.Waiting[0].Reason != "no container" {
		t.Errorf("%+v", m)
	}
	changed.Notify() // to the same: nothing is sent
	p.say(askedFor("web:80", "no port"))
	p.say(askedFor("db:1"))
	if got := <-asked; got != "[db:1/tcp]" {
		t.Errorf("%s: a text that cannot be read refuses the message", got)
	}
	r.connect("older")
	if got := <-asked; got != "[]" {
		t.Error(got)
	}
}

// What one process of a host asked for is not there for the next one, which did not ask for it.
// One that merely lost its session asks for the same.
func TestDemandsEndWithTheProcessOfTheHost(t *testing.T) {
	asked := make(chan string, 8)
	r := newRig(t, func(o *Options) {
		o.Demand = func(list []port.Demand) { asked <- fmt.Sprint(list) }
		o.Demands = func() []wire.Waiting { return nil }
		o.DemandsChanged = schedule.NewSignal()
	})
	as := func(s link.Session) link.Session { return demanding{s} }
	r.connectAs("first", as).say(askedFor("web:80"))
	for _, want := range []string{"[]", "[web:80/tcp]"} {
		if got := <-asked; got != want {
			t.Errorf("%s is asked for, want %s", got, want)
		}
	}
	r.connectAs("first", as)
	select {
	case got := <-asked:
		t.Errorf("%s is asked for when it is back", got)
	default:
	}
	r.connectAs("second", as)
	if got := <-asked; got != "[]" {
		t.Errorf("%s is asked for by the next one", got)
	}
}

// What was withdrawn because another host connected is not sent to it, although the wanted set has
// it still.
func TestAnotherHostIsNotSentWhatWasAskedFor(t *testing.T) {
	r := newRig(t, func(o *Options) { o.Published = func(k port.Key) bool { return k == key(80) } })
	byName := func(n uint16) port.Publication {
		p := pub(key(n), "web")
		p.Origins = []port.OriginInfo{{Origin: port.Origin{Source: port.SourceDemand, ID: fmt.Sprintf("web:%d/tcp", n)}}}
		return p
	}
	r.put(byName(80), byName(81), pub(key(82), "db"))
	p := r.connect("h")
	during(r.mustSync, func() {
		s, want := p.next().Snapshot, []port.Key{key(80), key(82)}
		var got []port.Key
		for _, w := range s.Publications {
			got = append(got, w.Key)
		}
		if !slices.Equal(got, want) {
			t.Errorf("%v is sent, want %v", got, want)
		}
		p.ack(s.Generation, got...)
	})
}

// A host that may not ask is told of what waits in the guest, at once.
func TestWhatWaitsInTheGuest(t *testing.T) {
	changed := schedule.NewSignal()
	r := newRig(t, func(o *Options) {
		o.Demands = func() []wire.Waiting { return []wire.Waiting{{Port: "web:80/tcp", Reason: "no container"}} }
		o.DemandsChanged = changed
	})
	p := r.connectAs("h", func(s link.Session) link.Session { return demanding{s} })
	if m := p.next().Demanded; m == nil || len(m.Waiting) != 1 || m.Waiting[0].Port != "web:80/tcp" {
		t.Errorf("%+v", m)
	}
}
