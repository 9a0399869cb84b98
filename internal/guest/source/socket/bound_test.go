// SPDX-License-Identifier: Apache-2.0

//go:build linux

package socket

import (
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead/fairlead/internal/guest/observer"
	"github.com/fairlead/fairlead/internal/port"
)

// diary is a feed that records each binding as "listens" or "bound", or "gone".
type diary struct {
	tally
	entries []string
}

func (d *diary) note(bs []port.Binding) {
	for _, b := range bs {
		if b.Withheld.IsZero() {
			d.entries = append(d.entries, "listens")
		} else {
			d.entries = append(d.entries, "bound")
		}
	}
}

func (d *diary) Replace(set []port.Binding) { d.note(set) }

func (d *diary) Apply(c port.Change) {
	for range c.Drop {
		d.entries = append(d.entries, "gone")
	}
	d.note(c.Put)
}

// bound runs f with a handler and a socket of a living process, first bound and
// then listening.
func bound(t *testing.T, f func(h *handler, d *diary, bound, listening observer.Socket)) {
	m := newMachine(t, "0::/\n")
	m.run(7, "web", "/bin/web", time.Hour, "0::/\n")
	h, _ := m.handler(0)
	s := listener(1, 80, 7, "web", seen(2*time.Hour))
	onlyBound := s
	onlyBound.Listening = false
	synctest.Test(t, func(t *testing.T) {
		d := new(diary)
		h.feed = d
		defer h.stop()
		f(h, d, onlyBound, s)
	})
}

func comes(s observer.Socket) []observer.Event { return []observer.Event{{Socket: s}} }
func goes(s observer.Socket) []observer.Event  { return []observer.Event{{Gone: true, Socket: s}} }

func expect(t *testing.T, d *diary, want ...string) {
	t.Helper()
	synctest.Wait()
	if !slices.Equal(d.entries, want) {
		t.Errorf("fed %q, want %q", d.entries, want)
	}
}

func TestSocketThatListensAtOnceIsFedOnce(t *testing.T) {
	bound(t, func(h *handler, d *diary, bound, listening observer.Socket) {
		h.Apply(comes(bound))
		expect(t, d)
		h.Apply(comes(listening))
		expect(t, d, "listens")
		time.Sleep(2 * boundDelay)
		expect(t, d, "listens")
	})
}

func TestBoundSocketIsFedAfterDelay(t *testing.T) {
	bound(t, func(h *handler, d *diary, bound, listening observer.Socket) {
		h.Apply(comes(bound))
		time.Sleep(2 * boundDelay)
		expect(t, d, "bound")
		h.Apply(comes(listening))
		expect(t, d, "bound", "listens")
	})
}

func TestSocketGoneBeforeDelayIsNotFed(t *testing.T) {
	bound(t, func(h *handler, d *diary, bound, _ observer.Socket) {
		h.Apply(comes(bound))
		h.Apply(goes(bound))
		time.Sleep(2 * boundDelay)
		expect(t, d, "gone") // a drop of an unknown binding changes nothing
	})
}

func TestSocketThatStopsListeningIsFedAtOnce(t *testing.T) {
	bound(t, func(h *handler, d *diary, bound, listening observer.Socket) {
		h.Apply(comes(listening))
		h.Apply(comes(bound))
		expect(t, d, "listens", "bound")
	})
}

func TestManyBoundSocketsAreFed(t *testing.T) {
	bound(t, func(h *handler, d *diary, bound, listening observer.Socket) {
		for i := range 4 {
			bound.Cookie, listening.Cookie = uint64(i+1), uint64(i+1)
			h.Apply(comes(bound))
			if i%2 == 0 {
				h.Apply(comes(listening))
			}
			time.Sleep(boundDelay / 8)
		}
		time.Sleep(2 * boundDelay)
		expect(t, d, "listens", "listens", "bound", "bound")
	})
}

func TestReplaceEndsTheDelay(t *testing.T) {
	bound(t, func(h *handler, d *diary, bound, _ observer.Socket) {
		h.Apply(comes(bound))
		h.Replace([]observer.Socket{bound})
		expect(t, d, "bound")
		time.Sleep(2 * boundDelay)
		expect(t, d, "bound")
		bound.Cookie, bound.Observed = 2, 0
		h.Apply(comes(bound)) // from a dump: not bound just now
		expect(t, d, "bound", "bound")
	})
}

func TestNothingIsFedAfterStop(t *testing.T) {
	bound(t, func(h *handler, d *diary, bound, _ observer.Socket) {
		h.Apply(comes(bound))
		h.stop()
		time.Sleep(2 * boundDelay)
		expect(t, d)
	})
}

func TestOwnBoundSocketIsNotFed(t *testing.T) {
	bound(t, func(h *handler, d *diary, bound, listening observer.Socket) {
		ours := false
		h.own = func(uint64) bool { return ours }
		h.Apply(comes(bound))
		ours = true
		h.Apply(comes(listening))
		time.Sleep(2 * boundDelay)
		expect(t, d)
	})
}
