// SPDX-License-Identifier: Apache-2.0

package peer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/netip"
	"path/filepath"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/schedule"
	"github.com/fairlead/fairlead/internal/testkit/ports"
	"github.com/fairlead/fairlead/internal/testkit/wait"
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
	f.d.Answer(w, port.Active, port.Reason{})
	return true
}

func (f *flaky) Add(_ context.Context, wishes []Wish) error {
	for _, w := range wishes {
		if err := f.call(func() { f.entries[w.Target] = w.Remote }); err != nil {
			return err
		}
		f.sent[w.Target] = w.Remote
		f.d.Answer(w, port.Active, port.Reason{})
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
		f.d = NewDriver(memory, nil, nil, log)
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

// bridging is a peer that connects to one address at the host's port, so that all
// it is to have needs a bridge.
type bridging struct {
	d  *Driver
	at Side
}

func (p bridging) Wishes(ctx context.Context, slot port.Slot) (out []Wish) {
	for h, k := range p.d.Decide(slot) {
		w := Wish{Target: Target{slot, h}, Key: k}
		if _, problem := p.d.Bridge(ctx, slot, p.d.Publication(k), p.at, slot.Port, port.Because(port.SystemFailed, "test")); !problem.IsZero() {
			p.d.Answer(w, port.Failed, problem)
			continue
		}
		out = append(out, w)
	}
	return out
}

func (p bridging) Known(w Wish) bool {
	p.d.Answer(w, port.Active, port.Reason{})
	return true
}

func (p bridging) Add(context.Context, []Wish) error      { return nil }
func (p bridging) Remove(context.Context, []Target) error { return nil }

func TestBridgesFollowTheWinners(t *testing.T) {
	b := newBridges(t)
	d := NewDriver("", b, schedule.NewSignal(), slog.New(slog.DiscardHandler))
	t.Cleanup(d.Close)
	w := newWanted()
	w.book = d.Book
	p := bridging{d, side("127.0.1.2/24")}
	n, m := ports.Free(t), ports.Free(t)
	host, other := fmt.Sprintf("127.0.0.1:%d", n), fmt.Sprintf("127.0.0.1:%d", m)
	owner := func(id string) port.Owner { return port.Owner{Kind: port.OwnerContainer, ID: id} }
	wantActive := func(guest string, served ...string) {
		t.Helper()
		if err := d.Apply(t.Context(), p); err != nil {
			t.Fatal(err)
		}
		out := d.Outcomes()[key(guest)]
		if len(out) != len(served) {
			t.Fatalf("outcomes = %+v, want %d", out, len(served))
		}
		for i, o := range out {
			if o.State != port.Active {
				t.Errorf("outcome = %+v, want active", o)
			}
			at := netip.AddrPortFrom(p.at.At, netip.MustParseAddrPort(served[i]).Port())
			if err := echoes(dialFrom(t, "127.0.1.1", at)); err != nil {
				t.Errorf("bridge at %s: %v", at, err)
			}
		}
		if len(b.open) != len(served) {
			t.Errorf("%d bridges are open, want %d", len(b.open), len(served))
		}
	}
	w.put(pub(owner("a"), "127.0.0.53:53", host))
	wantActive("127.0.0.53:53", host)
	w.put(pub(owner("b"), "127.0.0.1:53", host)) // wins
	wantActive("127.0.0.1:53", host)
	w.put(pub(owner("b"), "127.0.0.1:53"))
	w.put(pub(owner("a"), "127.0.0.53:53"))
	w.put(pub(owner("c"), "127.0.0.9:53", host)) // comes as the others go
	wantActive("127.0.0.9:53", host)
	w.put(pub(owner("c"), "127.0.0.9:53", host, other)) // at two ports
	wantActive("127.0.0.9:53", host, other)
	w.put(pub(owner("c"), "127.0.0.9:53", other))
	wantActive("127.0.0.9:53", other)
}

// dual is a peer that connects to an address of each family.
type dual struct {
	bridging
	v6 Side
}

func (p dual) Wishes(ctx context.Context, slot port.Slot) (out []Wish) {
	for h, k := range p.d.Decide(slot) {
		at := p.at
		if h.Is6() {
			at = p.v6
		}
		if _, problem := p.d.Bridge(ctx, slot, p.d.Publication(k), at, slot.Port, port.Because(port.SystemFailed, "test")); problem.IsZero() {
			out = append(out, Wish{Target: Target{slot, h}, Key: k})
		}
	}
	return out
}

// The bridge of one family ends although the other family still needs its own.
func TestBridgeOfEachFamilyEndsByItself(t *testing.T) {
	b := newBridges(t)
	d := NewDriver("", b, schedule.NewSignal(), slog.New(slog.DiscardHandler))
	t.Cleanup(d.Close)
	w := newWanted()
	w.book = d.Book
	p := dual{bridging{d, side("127.0.1.2/24")}, side("::1/128")}
	n := ports.Free(t)
	v4, v6 := fmt.Sprintf("127.0.0.1:%d", n), fmt.Sprintf("[::1]:%d", n)
	for _, hosts := range [][]string{{v4, v6}, {v6}, {v4, v6}, {v4}} {
		w.put(pub(port.Owner{Kind: port.OwnerContainer, ID: "a"}, "127.0.0.9:53", hosts...))
		if err := d.Apply(t.Context(), p); err != nil {
			t.Fatal(err)
		}
		if len(b.open) != len(hosts) {
			t.Errorf("%d bridges for %q", len(b.open), hosts)
		}
	}
}

// A bridge that can accept no more is opened again.
func TestFailedBridgeIsReplaced(t *testing.T) {
	b := newBridges(t)
	wake := schedule.NewSignal()
	d := NewDriver("", b, wake, slog.New(slog.DiscardHandler))
	t.Cleanup(d.Close)
	w := newWanted()
	w.book = d.Book
	p := bridging{d, side("127.0.1.2/24")}
	n := ports.Free(t)
	w.put(pub(port.Owner{Kind: port.OwnerContainer, ID: "a"}, "127.0.0.9:53", fmt.Sprintf("127.0.0.1:%d", n)))
	if err := d.Apply(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	for _, br := range b.open {
		b.failed(br, errors.New("accept: invalid argument"))
	}
	late := time.After(wait.Limit())
	for len(b.open) == 0 {
		select {
		case <-wake:
			if err := d.Apply(t.Context(), p); err != nil {
				t.Fatal(err)
			}
		case <-late:
			t.Fatal("no bridge is opened again")
		}
	}
	if err := echoes(dialFrom(t, "127.0.1.1", netip.AddrPortFrom(p.at.At, n))); err != nil {
		t.Error(err)
	}
}
