// SPDX-License-Identifier: Apache-2.0

//go:build linux

package socket

import (
	"fmt"
	"maps"
	"net/netip"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/guest/observer"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/testkit/heap"
)

// tally is a feed that only counts.
type tally struct{ puts, drops int }

func (f *tally) Apply(c port.Change)     { f.puts += len(c.Put); f.drops += len(c.Drop) }
func (f *tally) Replace([]port.Binding)  {}
func (f *tally) Stale(error)             {}
func (f *tally) Warn([]string)           {}
func (f *tally) Method(string)           {}
func (f *tally) Lacks(port.Lack, string) {}

// An event allocates only its binding and what is known of its process, and reads no file.
func TestSocketEventAllocatesLittle(t *testing.T) {
	m := newMachine(t, "0::/\n")
	m.run(7, "web", "/bin/web", time.Minute, "0::/\n")
	h, _ := m.handler(0)
	f := new(tally)
	h.feed = f
	s := observer.Socket{
		Cookie: 1, Protocol: port.TCP, Address: netip.MustParseAddr("127.0.0.1"), Port: 80, Listening: true,
		PID: 7, Comm: "web", PIDSeen: int64(2 * time.Hour), CgroupID: 1,
	}
	up, down := []observer.Event{{Socket: s}}, []observer.Event{{Gone: true, Socket: s}}
	n := testing.AllocsPerRun(1000, func() {
		h.Apply(up)
		h.Apply(down)
	})
	if n > mostAllocs {
		t.Errorf("a socket that comes and goes allocates %v times, want at most %d", n, mostAllocs)
	}
	if f.puts != 1001 || f.drops != 1001 {
		t.Errorf("%d puts, %d drops", f.puts, f.drops)
	}
}

const mostAllocs = 5

// A socket of both families has two bindings, which come and go together; one of one family
// costs no other drop.
func TestSocketOfBothFamilies(t *testing.T) {
	m := newMachine(t, "0::/\n")
	m.run(7, "web", "/bin/web", time.Minute, "0::/\n")
	h, _ := m.handler(0)
	f := &fed{have: make(map[string]string)}
	h.feed = f
	s := observer.Socket{
		Cookie: 0x1f, Protocol: port.TCP, Address: netip.IPv6Unspecified(), Port: 80, Listening: true, PID: 7, Comm: "web", PIDSeen: int64(2 * time.Hour), CgroupID: 1,
	}
	six := s
	six.V6Only = true
	both := "[1f/4:0.0.0.0:80 mapped 1f:[::]:80]"
	for _, c := range []struct {
		what   string
		events []observer.Event
		want   string
		drops  int
	}{
		{"both families", []observer.Event{{Socket: s}}, both, 0},
		{"again", []observer.Event{{Socket: s}}, both, 0},
		{"one family", []observer.Event{{Socket: six}}, "[1f:[::]:80]", 1},
		{"it is closed", []observer.Event{{Gone: true, Socket: six}}, "[]", 1},
		{"both again", []observer.Event{{Socket: s}}, both, 0},
		{"closed", []observer.Event{{Gone: true, Socket: s}}, "[]", 2},
	} {
		f.drops = 0
		h.Apply(c.events)
		if got := f.String(); got != c.want || f.drops != c.drops {
			t.Errorf("%s: %s after %d drops, want %s after %d", c.what, got, f.drops, c.want, c.drops)
		}
	}
	h.Replace([]observer.Socket{s})
	if got := f.String(); got != both {
		t.Errorf("a dump: %s, want %s", got, both)
	}
	h.Apply([]observer.Event{{Gone: true, Socket: s}})
	if got := f.String(); got != "[]" || len(h.mapped) > 0 {
		t.Errorf("after the dump, closed: %s, and %d halves are remembered", got, len(h.mapped))
	}
}

// fed is a feed that keeps the set, by origin.
type fed struct {
	tally
	have map[string]string
}

func (f *fed) Replace(set []port.Binding) {
	clear(f.have)
	f.Apply(port.Change{Put: set})
}

func (f *fed) Apply(c port.Change) {
	f.tally.Apply(c)
	for _, o := range c.Drop {
		delete(f.have, o.ID)
	}
	for _, b := range c.Put {
		text := b.Origin.ID + ":" + b.AddrPort().String()
		if b.Mapped {
			text += " mapped"
		}
		f.have[b.Origin.ID] = text
	}
}

func (f *fed) String() string { return fmt.Sprint(slices.Sorted(maps.Values(f.have))) }

// What is kept of many sockets that depend on the network, and of their makers, leaves less
// than a hundredth of what it took when they have gone.
func TestMemoryOfSocketsIsFreed(t *testing.T) {
	const n = 50_000
	h, _ := newMachine(t, "0::/\n").handler(0)
	h.feed = new(tally)
	apply := func(gone bool) {
		for i := range uint64(n) {
			h.Apply([]observer.Event{{Gone: gone, Socket: observer.Socket{
				Cookie: 1 + i, Protocol: port.TCP, Address: netip.MustParseAddr("10.0.0.1"), Port: uint16(i), Listening: true,
				PID: uint32(1 + i), PIDSeen: 1, Comm: "web", CgroupID: 1,
			}}})
		}
	}
	before := heap.Used()
	apply(false)
	full := heap.Used() - before
	if len(h.placed) != n || len(h.processes.makers) != n {
		t.Errorf("%d sockets depend on the network and %d have makers, want %d", len(h.placed), len(h.processes.makers), n)
	}
	apply(true)
	h.processes.beginBatch()
	if left := heap.Used() - before; left > full/100 {
		t.Errorf("%d of %d bytes are left", left, full)
	}
	runtime.KeepAlive(h)
}
