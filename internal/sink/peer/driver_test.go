// SPDX-License-Identifier: Apache-2.0

package peer

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"math/rand/v2"
	"path/filepath"
	"testing"

	"github.com/fairlead/fairlead/internal/port"
)

// flaky is a peer that fails now and then, before or after it did what it was
// asked for, and that knows nothing after a restart.
type flaky struct {
	d       *Driver
	rng     *rand.Rand
	failing bool
	entries map[Target]string // what it serves
	sent    map[Target]string // what was answered since the restart
}

func (f *flaky) call(do func()) error {
	if f.failing && f.rng.IntN(3) == 0 {
		if f.rng.IntN(2) == 0 {
			do()
		}
		return errors.New("no answer")
	}
	do()
	return nil
}

func (f *flaky) Wishes(_ context.Context, slot port.Slot) (out []Wish) {
	for h, k := range f.d.Decide(slot) {
		out = append(out, Wish{Target: Target{slot, h}, Key: k, Remote: k.String()})
	}
	return out
}

func (f *flaky) Known(w Wish) bool {
	if remote, ok := f.sent[w.Target]; !ok || remote != w.Remote {
		return false
	}
	f.d.Answer(w, port.Active, "")
	return true
}

func (f *flaky) Add(_ context.Context, wishes []Wish) error {
	for _, w := range wishes {
		if err := f.call(func() { f.entries[w.Target] = w.Remote }); err != nil {
			return err
		}
		f.sent[w.Target] = w.Remote
		f.d.Answer(w, port.Active, "")
	}
	return nil
}

func (f *flaky) Remove(_ context.Context, targets []Target) error {
	for _, t := range targets {
		delete(f.sent, t)
		if err := f.call(func() { delete(f.entries, t) }); err != nil {
			return err
		}
		f.d.Removed(t)
	}
	return nil
}

// Whatever is wanted, whenever the peer fails or restarts, and whenever the agent
// is killed: in the end the peer has what is wanted and nothing else.
func TestDriverConverges(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	memory := Memory(filepath.Join(t.TempDir(), "peer.json"))
	log := slog.New(slog.DiscardHandler)
	f := &flaky{rng: rng, entries: make(map[Target]string), sent: make(map[Target]string)}
	w := newWanted()
	begin := func() {
		f.d = NewDriver(memory, nil, log)
		w.book = f.d.Book
		clear(f.sent)
		for _, p := range w.View().All() {
			w.put(p)
		}
		f.d.MarkAll()
	}
	begin()
	guests := []string{"0.0.0.0:80", "127.0.0.1:80", "10.0.0.1:80", "[::]:80", "10.0.0.1:81"}
	hosts := []string{"127.0.0.1:80", "0.0.0.0:80", "[::1]:80", "127.0.0.1:81"}
	for range 1500 {
		switch rng.IntN(20) {
		case 0: // the peer restarts
			clear(f.entries)
			clear(f.sent)
			f.d.MarkAll()
		case 1: // the agent is killed
			begin()
		default:
			var ask []string
			for _, h := range hosts {
				if rng.IntN(3) == 0 {
					ask = append(ask, h)
				}
			}
			w.put(pub(port.Owner{}, guests[rng.IntN(len(guests))], ask...))
		}
		f.failing = rng.IntN(2) == 0
		if err := f.d.Apply(t.Context(), f); err != nil && len(f.d.Dirty()) == 0 {
			t.Fatal("an error, and nothing is left to do")
		}
		if f.failing {
			continue
		}
		want := make(map[Target]string)
		for slot := range f.d.slots {
			for _, wish := range f.Wishes(t.Context(), slot) {
				want[wish.Target] = wish.Remote
			}
		}
		if !maps.Equal(f.entries, want) {
			t.Fatalf("the peer has %v, want %v", f.entries, want)
		}
		saved, err := memory.Load()
		if err != nil || len(saved) != len(want) {
			t.Fatalf("%d entries are saved, want %d: %v", len(saved), len(want), err)
		}
	}
	f.failing = false
	f.d.Leave(t.Context(), f)
	if saved, err := memory.Load(); len(f.entries) > 0 || len(saved) > 0 || err != nil {
		t.Errorf("left: %v, saved: %v, %v", f.entries, saved, err)
	}
}
