// SPDX-License-Identifier: Apache-2.0

//go:build linux

package socket

import (
	"net/netip"
	"runtime"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/observer"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/registry"
	"github.com/fairlead/fairlead/internal/testkit/heap"
)

// tally is a feed that only counts.
type tally struct{ puts, drops int }

func (f *tally) Apply(c port.Change)         { f.puts += len(c.Put); f.drops += len(c.Drop) }
func (f *tally) Replace([]port.Binding)      {}
func (f *tally) Stale(error)                 {}
func (f *tally) Warn([]string)               {}
func (f *tally) Method(string)               {}
func (f *tally) Lacks(registry.Lack, string) {}

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
