// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"context"
	"log/slog"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/table"
)

// hintCounter counts the keys that it is given.
type hintCounter struct{ keys int }

func (s *hintCounter) Name() string          { return "counter" }
func (s *hintCounter) Wake() <-chan struct{} { return nil }

func (s *hintCounter) Sync(_ context.Context, want View, c Change) (port.Outcomes, error) {
	s.keys += len(c.Keys)
	out := make(port.Outcomes, len(c.Keys))
	for _, k := range c.Keys {
		if _, ok := want.Get(k); ok {
			out[k] = []port.Outcome{{State: port.Active, HostAddress: k.AddrPort()}}
		}
	}
	return out, nil
}

// A change is carried to a sink by itself, whatever the table holds.
func TestSyncCostIsFlat(t *testing.T) {
	cost := func(n int) (allocs float64, keys int) {
		from := table.New[port.Key, port.Publication](port.Key.Compare)
		pub := func(i int) port.Publication {
			k := port.Key{Protocol: port.TCP, Port: uint16(1 + i%60000), Address: netip.AddrFrom4([4]byte{10, 0, byte(i / 60000), 1})}
			return port.Publication{Fact: port.Fact{Key: k, Decision: port.Decision{Allow: true}}}
		}
		from.Update(func(tx *table.Tx[port.Key, port.Publication]) {
			for i := range n {
				tx.Put(pub(i).Key, pub(i))
			}
		})
		sink := new(hintCounter)
		r := New(from, []Sink{sink}, Options{Logger: slog.New(slog.DiscardHandler)})
		upstream, downstream := from.Subscribe(), r.wanted.Subscribe()
		defer upstream.Close()
		defer downstream.Close()
		h := holds{due: make(map[port.Key]time.Time)}
		w := worker{r: r, sink: sink, count: &r.counters[0], log: r.log}
		carry := func() {
			view, change := upstream.Take()
			r.apply(view, change, &h)
			view, change = downstream.Take()
			w.sync(t.Context(), view, change)
		}
		carry()
		x := pub(n)
		const rounds = 100
		sink.keys = 0
		allocs = testing.AllocsPerRun(rounds, func() {
			from.Update(func(tx *table.Tx[port.Key, port.Publication]) { tx.Put(x.Key, x) })
			carry()
			from.Update(func(tx *table.Tx[port.Key, port.Publication]) { tx.Delete(x.Key) })
			carry()
		})
		return allocs, sink.keys / (rounds + 1)
	}
	few, keys := cost(10)
	many, keysMany := cost(10_000)
	if keys != 2 || keysMany != 2 {
		t.Errorf("the sink was given %d keys with 10 publications, %d with 10,000; want 2", keys, keysMany)
	}
	if few > mostAllocs || many > few+treeAllocs {
		t.Errorf("a publication that comes and goes allocates %v times among 10, %v among 10,000; want at most %d and %d more", few, many, mostAllocs, treeAllocs)
	}
}

const (
	mostAllocs = 50
	treeAllocs = 40 // copies of the nodes on one path, each time
)

func TestUnionOfChangedKeys(t *testing.T) {
	key := func(n uint16) port.Key { return port.Key{Protocol: port.TCP, Port: n} }
	a, b := []port.Key{key(3), key(1)}, []port.Key{key(2), key(3)}
	if got := union(a[:1:2], b); !slices.Equal(got, []port.Key{key(3), key(2)}) || a[1] != key(1) {
		t.Errorf("union = %v, beside it %v", got, a)
	}
	if got := union(a, b); !slices.Equal(got, []port.Key{key(3), key(1), key(2)}) {
		t.Errorf("union = %v", got)
	}
	if !slices.Equal(union(nil, b), b) || !slices.Equal(union(a, nil), a) {
		t.Error("nothing adds something")
	}
}

// Outcomes are kept for as long as their port is there, so they have no room to spare.
func TestOutcomesHaveNoRoomToSpare(t *testing.T) {
	k := port.Key{Protocol: port.TCP, Port: 80, Address: netip.IPv4Unspecified()}
	outcomes := table.New[port.Key, Outcomes](port.Key.Compare)
	w := worker{sink: new(hintCounter)}
	for _, state := range []port.State{port.Pending, port.Active, port.Failed} {
		outcomes.Update(func(tx *table.Tx[port.Key, Outcomes]) {
			replace(tx, w.sink.Name(), k, []port.Outcome{{State: state}}, time.Now())
		})
		if got, _ := outcomes.View().Get(k); len(got) != 1 || cap(got) != 1 {
			t.Errorf("%v: %d outcomes with room for %d", state, len(got), cap(got))
		}
	}
}
