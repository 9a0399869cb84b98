// SPDX-License-Identifier: Apache-2.0

package table

import (
	"cmp"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
)

func newTable() *Table[int, string] { return New[int, string](cmp.Compare[int]) }

func put(t *Table[int, string], k int, v string) {
	t.Update(func(tx *Tx[int, string]) { tx.Put(k, v) })
}

func TestViewIsImmutable(t *testing.T) {
	tab := newTable()
	put(tab, 1, "a")
	before := tab.View()
	put(tab, 1, "b")
	tab.Update(func(tx *Tx[int, string]) { tx.Delete(2); tx.Put(3, "c") })
	if v, _ := before.Get(1); v != "a" || before.Len() != 1 || before.Generation() != 1 {
		t.Errorf("the old view changed: %q, %d keys, generation %d", v, before.Len(), before.Generation())
	}
	after := tab.View()
	if got := maps.Collect(after.All()); !maps.Equal(got, map[int]string{1: "b", 3: "c"}) {
		t.Errorf("view = %v", got)
	}
}

func TestUpdateWithoutChangeKeepsGeneration(t *testing.T) {
	tab := newTable()
	if g := tab.Update(func(tx *Tx[int, string]) { tx.Delete(7) }); g != 0 {
		t.Errorf("generation = %d, want 0", g)
	}
}

func TestRange(t *testing.T) {
	tab := newTable()
	tab.Update(func(tx *Tx[int, string]) {
		for i := range 100 {
			tx.Put(i, "")
		}
		if got := tx.Range(40, 43); !slices.Equal(got, []int{40, 41, 42, 43}) {
			t.Errorf("Range = %v", got)
		}
		if got := tx.Range(200, 300); len(got) != 0 {
			t.Errorf("Range beyond the end = %v", got)
		}
	})
	var got []int
	for k := range tab.View().Range(40, 43) {
		if got = append(got, k); k == 42 {
			break
		}
	}
	if !slices.Equal(got, []int{40, 41, 42}) {
		t.Errorf("Range of a view = %v", got)
	}
	for k := range (View[int, string]{}).Range(0, 9) {
		t.Errorf("Range of an empty view has %d", k)
	}
}

func TestSubscriptionCoalescesChanges(t *testing.T) {
	tab := newTable()
	put(tab, 1, "a")
	sub := tab.Subscribe()
	defer sub.Close()
	<-sub.C()
	if _, c := sub.Take(); !slices.Equal(c.Keys, []int{1}) || c.Base != 0 || c.Generation != 1 {
		t.Fatalf("first Take = %+v", c)
	}
	put(tab, 2, "x")
	put(tab, 2, "y")
	tab.Update(func(tx *Tx[int, string]) { tx.Delete(1) })
	<-sub.C()
	view, c := sub.Take()
	slices.Sort(c.Keys)
	if !slices.Equal(c.Keys, []int{1, 2}) || c.Base != 1 || c.Generation != 4 {
		t.Errorf("second Take = %+v", c)
	}
	if _, ok := view.Get(1); ok {
		t.Error("the removed key is still there")
	}
	select {
	case <-sub.C():
		t.Error("woken without a change")
	default:
	}
}

// A watch is woken by each change, and names no keys.
func TestWatch(t *testing.T) {
	tab := newTable()
	put(tab, 1, "a")
	w := tab.Watch()
	defer w.Close()
	for generation := uint64(1); generation < 4; generation++ {
		<-w.C()
		view, c := w.Take()
		if len(c.Keys) != 0 || c.Base+1 != generation || c.Generation != generation || !view.Has(int(generation)) || view.Has(9) {
			t.Errorf("Take = %+v", c)
		}
		put(tab, int(generation)+1, "b")
	}
}

// A subscriber that applies every change holds what the table holds.
func TestSubscriberFollows(t *testing.T) {
	tab := newTable()
	sub := tab.Subscribe()
	defer sub.Close()
	var wg sync.WaitGroup
	for w := range 4 {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(1, uint64(w)))
			for i := range 2000 {
				k := r.IntN(50)
				tab.Update(func(tx *Tx[int, string]) {
					if r.IntN(2) == 0 {
						tx.Delete(k)
					} else {
						tx.Put(k, fmt.Sprint(w, i))
					}
				})
			}
		})
	}
	done := make(chan struct{})
	go func() { wg.Wait(); close(done) }()
	got := map[int]string{}
	take := func() {
		view, c := sub.Take()
		for _, k := range c.Keys {
			if v, ok := view.Get(k); ok {
				got[k] = v
			} else {
				delete(got, k)
			}
		}
	}
	for running := true; running; {
		select {
		case <-sub.C():
			take()
		case <-done:
			running = false
		}
	}
	take()
	if want := maps.Collect(tab.View().All()); !maps.Equal(got, want) {
		t.Errorf("followed %d keys, the table holds %d", len(got), len(want))
	}
}

func TestShare(t *testing.T) {
	from, to := newTable(), newTable()
	put(from, 1, "one")
	v := from.View()
	put(from, 1, "later")
	to.Update(func(tx *Tx[int, string]) {
		if !tx.Share(v, 1) || tx.Share(v, 2) || tx.Share(View[int, string]{}, 1) {
			t.Error("a view is not what it shares")
		}
	})
	if got, ok := to.View().Get(1); !ok || got != "one" || to.View().Len() != 1 || to.View().Generation() != 1 {
		t.Errorf("%q, %v", got, ok)
	}
	put(to, 1, "own")
	if got, _ := v.Get(1); got != "one" {
		t.Errorf("the view now says %q", got)
	}
}

// One change costs the same whatever the table holds: allocations are the
// nodes on one path.
func TestChangeCostIsFlat(t *testing.T) {
	cost := func(n int) float64 {
		tab := newTable()
		tab.Update(func(tx *Tx[int, string]) {
			for i := range n {
				tx.Put(i, "")
			}
		})
		_ = tab.View()
		return testing.AllocsPerRun(100, func() {
			put(tab, n/2, "x")
			_ = tab.View()
		})
	}
	small, large := cost(100), cost(100_000)
	if large > small+8 {
		t.Errorf("a change allocates %v times in a table of 100 and %v in one of 100,000", small, large)
	}
}

// To look a key up allocates nothing.
func TestGetAllocatesNothing(t *testing.T) {
	tab := newTable()
	for i := range 1000 {
		put(tab, i, "")
	}
	v := tab.View()
	n := testing.AllocsPerRun(100, func() {
		for i := range 1000 {
			_, _ = v.Get(i)
		}
	})
	// The race detector has pools forget now and then.
	if n > 500 {
		t.Errorf("1,000 look-ups allocate %v times", n)
	}
}

func TestChangedKeysAreUniqueAndOrdered(t *testing.T) {
	tab := newTable()
	s := tab.Subscribe()
	defer s.Close()
	s.Take()
	for _, k := range []int{5, 3, 5, 9, 3} {
		put(tab, k, "")
	}
	tab.Update(func(tx *Tx[int, string]) { tx.Delete(5); tx.Put(1, "") })
	if _, c := s.Take(); !slices.Equal(c.Keys, []int{5, 3, 9, 1}) {
		t.Errorf("keys = %v", c.Keys)
	}
	put(tab, 5, "")
	if _, c := s.Take(); !slices.Equal(c.Keys, []int{5}) {
		t.Errorf("then keys = %v", c.Keys)
	}
}

// A subscriber to some values is woken when a key gets one of these, changes it or loses it.
func TestSubscribeTo(t *testing.T) {
	tab := newTable()
	put(tab, 1, "yes")
	put(tab, 2, "no")
	s := tab.SubscribeTo(func(v string) bool { return v == "yes" })
	for _, step := range []struct {
		do   func()
		want []int
	}{
		{func() {}, []int{1}},
		{func() { put(tab, 3, "no") }, nil},
		{func() { put(tab, 3, "yes") }, []int{3}},
		{func() { put(tab, 3, "no") }, []int{3}},
		{func() { tab.Update(func(tx *Tx[int, string]) { tx.Delete(3); tx.Delete(2) }) }, nil},
		{func() { tab.Update(func(tx *Tx[int, string]) { tx.Delete(1); tx.Put(4, "yes") }) }, []int{1, 4}},
	} {
		step.do()
		woken := false
		select {
		case <-s.C():
			woken = true
		default:
		}
		if woken != (step.want != nil) {
			t.Errorf("woken: %v, want %v", woken, step.want)
		}
		if _, c := s.Take(); !slices.Equal(c.Keys, step.want) {
			t.Errorf("took %v, want %v", c.Keys, step.want)
		}
	}
	put(tab, 6, "yes")
	<-s.C()
	put(tab, 7, "no")
	select {
	case <-s.C():
		t.Error("woken by another's change, with something to take")
	default:
	}
	_, _ = s.Take()
	s.Close()
	put(tab, 5, "yes")
	if _, c := s.Take(); len(c.Keys) != 0 {
		t.Errorf("took %v after Close", c.Keys)
	}
}
