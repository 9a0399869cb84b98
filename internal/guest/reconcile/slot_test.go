// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"context"
	"net/netip"
	"slices"
	"testing"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/table"
)

func TestSlot(t *testing.T) {
	from := table.New[port.Key, port.Publication](port.Key.Compare)
	put := func(n uint16) Change {
		k := port.Key{Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: n}
		from.Update(func(tx *table.Tx[port.Key, port.Publication]) { tx.Put(k, port.Publication{Fact: port.Fact{Key: k}}) })
		return Change{Base: 1, Keys: []port.Key{k}}
	}
	s := NewSlot("x")
	want := func(when string, c Change, states ...port.State) {
		t.Helper()
		out, err := s.Sync(t.Context(), from.View(), c)
		var got []port.State
		for _, k := range slices.SortedFunc(keysOf(out), port.Key.Compare) {
			state := port.State(0)
			if len(out[k]) > 0 {
				state = out[k][0].State
			}
			got = append(got, state)
		}
		if err != nil || !slices.Equal(got, states) {
			t.Errorf("%s: %v, %v, want %v", when, got, err, states)
		}
	}
	want("empty", put(80), 0)
	s.Put(nil, port.Because(port.PeerUnproved, "none is there"))
	<-s.Wake()
	want("with a reason: all", put(81), port.Pending, port.Pending)
	want("what is new", put(82), port.Pending)
	sink := newSink()
	s.Put(sink, port.Reason{})
	<-s.Wake()
	want("a sink gets all", put(83), port.Active, port.Active, port.Active, port.Active)
	want("and then changes", put(84), port.Active)
	s.Put(nil, port.Reason{})
	<-s.Wake()
	want("gone", Change{Base: 1}, 0, 0, 0, 0, 0)
	want("nothing new", Change{Base: 1})
	s.Put(nil, port.Reason{})
	select {
	case <-s.Wake():
		t.Error("no change, and a wake-up")
	default:
	}
}

// A sink that is withdrawn closes what it published, and gets all when it is put again.
func TestSlotWithdraw(t *testing.T) {
	from := table.New[port.Key, port.Publication](port.Key.Compare)
	k := port.Key{Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: 80}
	from.Update(func(tx *table.Tx[port.Key, port.Publication]) { tx.Put(k, port.Publication{Fact: port.Fact{Key: k}}) })
	s, sink := NewSlot("x"), &viewed{}
	left := func() bool {
		select {
		case <-s.Withdraw():
			return true
		default:
			return false
		}
	}
	sync := func(want ...int) {
		t.Helper()
		if _, err := s.Sync(t.Context(), from.View(), Change{Base: 1}); err != nil || !slices.Equal(sink.views, want) {
			t.Errorf("views of %v publications, %v, want %v", sink.views, err, want)
		}
	}
	if !left() {
		t.Error("an empty slot waits")
	}
	s.Put(sink, port.Reason{})
	if !left() {
		t.Error("the slot waits for a sink that published nothing")
	}
	s.Put(sink, port.Reason{})
	sync(1)
	if first, again := left(), left(); first || again {
		t.Error("the sink left before it closed what it published")
	}
	sync(1, 0)
	if !left() {
		t.Error("the slot waits for a sink that has left")
	}
	sync(1, 0)
	s.Put(sink, port.Reason{})
	sync(1, 0, 1)
	wait := s.Withdraw()
	s.Put(sink, port.Reason{})
	<-wait // it stays
	sync(1, 0, 1, 1)
}

// viewed notes how many publications it was synced with.
type viewed struct{ views []int }

func (v *viewed) Name() string          { return "x" }
func (v *viewed) Wake() <-chan struct{} { return nil }
func (v *viewed) Sync(_ context.Context, want View, _ Change) (port.Outcomes, error) {
	v.views = append(v.views, want.Len())
	return nil, nil
}

func keysOf(out port.Outcomes) func(yield func(port.Key) bool) {
	return func(yield func(port.Key) bool) {
		for k := range out {
			if !yield(k) {
				return
			}
		}
	}
}
