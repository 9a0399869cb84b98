// SPDX-License-Identifier: Apache-2.0

//go:build linux

package observer

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"runtime"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/guest/kernel/bpf"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/testkit/heap"
)

// oracle is a kernel: it has sockets, reports their changes through a ring, and
// can be dumped while they change.
type oracle struct {
	rng      *rand.Rand
	source   *fakeSource
	attached bool // hooks are there: changes make events
	deaf     bool // events are lost
	still    bool // nothing changes
	skip     int  // rows that a dump may yet skip
	next     uint64
	sockets  map[uint64]*oracleSocket
}

type oracleSocket struct {
	protocol port.Protocol
	state    string // "bound", "listening", "connected", "client", "closing"
	port     uint16
	left     int // steps that close(2) still takes
}

func newOracle(seed uint64) *oracle {
	return &oracle{
		rng: rand.New(rand.NewPCG(seed, 1)), source: newFakeSource(), sockets: make(map[uint64]*oracleSocket),
	}
}

func (o *oracle) emit(kind bpf.SockEventKind, cookie uint64, s *oracleSocket, portNow uint16) {
	if !o.attached {
		return
	}
	if o.deaf {
		o.source.lose()
		return
	}
	e := bpf.SockEvent{
		Observed: 1 + cookie, Cookie: cookie, Port: portNow, Kind: uint8(kind), Protocol: uint8(s.protocol),
		Family: unix.AF_INET, Pid: 1,
	}
	if s.state == "listening" {
		e.State = tcpListen
	}
	o.source.send(e)
}

// step makes one random change.
func (o *oracle) step() {
	for cookie, s := range o.sockets {
		if s.state != "closing" {
			continue
		}
		if s.left--; s.left < 0 {
			delete(o.sockets, cookie)
		}
	}
	cookies := slices.Sorted(maps.Keys(o.sockets))
	if len(cookies) == 0 || len(cookies) < 40 && o.rng.IntN(3) == 0 {
		o.open()
		return
	}
	cookie := cookies[o.rng.IntN(len(cookies))]
	s := o.sockets[cookie]
	if s.state == "closing" {
		return
	}
	switch o.rng.IntN(5) {
	case 0: // shutdown, or listen again
		switch {
		case s.protocol == port.TCP && s.state == "listening":
			s.state = "bound"
			o.emit(bpf.SockEventKindEVENT_UNLISTEN, cookie, s, s.port)
		case s.protocol == port.TCP && s.state == "bound":
			s.state = "listening"
			o.emit(bpf.SockEventKindEVENT_LISTEN, cookie, s, s.port)
		}
	case 1: // connect
		switch {
		case s.state == "bound":
			s.state = "connected"
			o.emit(bpf.SockEventKindEVENT_CONNECT, cookie, s, s.port)
		case s.state == "client":
			s.state = "connected"
		}
	default:
		delete(o.sockets, cookie)
		if s.state == "client" || s.state == "connected" {
			return
		}
		o.emit(bpf.SockEventKindEVENT_CLOSE, cookie, s, s.port)
		if s.protocol == port.TCP && o.attached && !o.deaf {
			s.state, s.left = "closing", o.rng.IntN(20)
			o.sockets[cookie] = s
		}
	}
}

func (o *oracle) open() {
	o.next++
	cookie := o.next
	s := &oracleSocket{port: uint16(1 + o.rng.IntN(65535)), protocol: port.TCP}
	o.sockets[cookie] = s
	switch o.rng.IntN(5) {
	case 0:
		s.protocol, s.state = port.UDP, "client"
	case 1:
		s.protocol, s.state = port.UDP, "bound"
		o.emit(bpf.SockEventKindEVENT_BIND, cookie, s, s.port)
	case 2:
		s.state = "listening"
		o.emit(bpf.SockEventKindEVENT_LISTEN, cookie, s, 0)
	case 3:
		s.state = "bound"
		o.emit(bpf.SockEventKindEVENT_BIND, cookie, s, s.port)
		s.state = "listening"
		o.emit(bpf.SockEventKindEVENT_LISTEN, cookie, s, s.port)
	case 4:
		s.state = "bound"
		o.emit(bpf.SockEventKindEVENT_BIND, cookie, s, s.port)
	}
}

func (o *oracle) steps(n int) {
	for range n {
		if o.still {
			return
		}
		o.step()
	}
}

// dump visits the sockets one by one, and they change in between.
func (o *oracle) dump(context.Context, scope) ([]row, scope, error) {
	var rows []row
	cookies := slices.Collect(maps.Keys(o.sockets))
	o.rng.Shuffle(len(cookies), func(i, j int) { cookies[i], cookies[j] = cookies[j], cookies[i] })
	for _, cookie := range cookies {
		o.steps(o.rng.IntN(3))
		s := o.sockets[cookie]
		if s == nil || s.state == "connected" {
			continue
		}
		if o.skip > 0 && o.rng.IntN(10) == 0 {
			o.skip--
			continue
		}
		rows = append(rows, row{
			socket: Socket{
				Cookie: cookie, Protocol: s.protocol, Port: s.port, Address: netip.IPv4Unspecified(),
				Listening: s.protocol == port.UDP || s.state == "listening",
			},
			client: s.state == "client",
		})
	}
	o.steps(o.rng.IntN(20))
	return rows, scopeAll, nil
}

// truth is what must be shown.
func (o *oracle) truth() []string {
	var all []string
	for cookie, s := range o.sockets {
		switch s.state {
		case "bound", "listening":
			all = append(all, fmt.Sprintf("%d %v %d %v", cookie, s.protocol, s.port, s.protocol == port.UDP || s.state == "listening"))
		}
	}
	slices.Sort(all)
	return all
}

func shown(k *keeper) []string {
	var all []string
	for cookie, s := range k.set {
		all = append(all, fmt.Sprintf("%d %v %d %v", cookie, s.Protocol, s.Port, s.Listening))
	}
	slices.Sort(all)
	return all
}

// settle makes dumps until no event needs another one.
func settle(t *testing.T, e *engine) {
	t.Helper()
	for range 100 {
		if err := e.drain(); err != nil {
			t.Fatal(err)
		}
		if !e.resync && e.resolve == 0 && len(e.source.(*fakeSource).queue) == 0 {
			return
		}
		j := job{scope: scopeAll, replace: e.resync, resolve: e.resolve}
		if err := e.run(t.Context(), j); err != nil {
			t.Fatal(err)
		}
	}
	t.Fatal("does not settle")
}

// TestModelAgainstOracle starts in the midst of changes and must agree with the
// kernel whenever it is still, without any repair.
func TestModelAgainstOracle(t *testing.T) {
	for seed := range uint64(500) {
		o := newOracle(seed)
		o.steps(60)
		k := newKeeper()
		e := newTestEngine(k)
		e.source, e.dump = o.source, o.dump
		o.attached = true
		o.steps(30)
		if err := e.run(t.Context(), job{scope: scopeAll, replace: true}); err != nil {
			t.Fatal(err)
		}
		for round := range 5 {
			o.steps(o.rng.IntN(50))
			if round == 3 {
				if err := e.run(t.Context(), job{scope: scopeAll, audited: scopeAll}); err != nil {
					t.Fatal(err)
				}
			}
			calm(o, func() { settle(t, e) })
			if got, want := shown(k), o.truth(); !slices.Equal(got, want) {
				t.Fatalf("seed %d, round %d:\nhave %q\nwant %q", seed, round, got, want)
			}
		}
		if n := e.counters.drift.Load(); n != 0 {
			t.Fatalf("seed %d: drift of %d without a cause", seed, n)
		}
	}
}

// calm lets f dump a kernel in which nothing changes.
func calm(o *oracle, f func()) {
	o.still = true
	f()
	o.still = false
}

// TestModelAfterLoss loses events and skips rows of dumps. After a loss is known
// one dump puts all right; a row that the kernel skipped costs at most an audit.
func TestModelAfterLoss(t *testing.T) {
	for seed := range uint64(300) {
		o := newOracle(seed)
		o.attached = true
		k := newKeeper()
		e := newTestEngine(k)
		e.source, e.dump = o.source, o.dump
		o.steps(50)
		o.skip = 1
		if err := e.run(t.Context(), job{scope: scopeAll, replace: true}); err != nil {
			t.Fatal(err)
		}
		o.steps(20)
		o.deaf = true
		o.steps(1 + o.rng.IntN(30))
		o.deaf = false
		o.steps(10)
		if _, err := e.take(); err != nil {
			t.Fatal(err)
		}
		drops, _ := o.source.drops()
		lost := drops > 0
		o.skip = 1
		if lost {
			if !e.resync {
				t.Fatalf("seed %d: the loss of %d events went unnoticed", seed, drops)
			}
			if err := e.run(t.Context(), job{scope: scopeAll, replace: true}); err != nil {
				t.Fatal(err)
			}
			if e.counters.resyncs.Load() != 1 || e.counters.drops.Load() != drops {
				t.Fatalf("seed %d: %d resyncs, %d drops", seed, e.counters.resyncs.Load(), e.counters.drops.Load())
			}
		}
		o.skip = 0
		calm(o, func() {
			settle(t, e)
			if err := e.run(t.Context(), job{scope: scopeAll, audited: scopeAll}); err != nil {
				t.Fatal(err)
			}
		})
		if got, want := shown(k), o.truth(); !slices.Equal(got, want) {
			t.Fatalf("seed %d:\nhave %q\nwant %q", seed, got, want)
		}
	}
}

func TestInterfaceThatIsBoundLater(t *testing.T) {
	moved := func(protocol port.Protocol, cookie uint64, device uint32) *record {
		return &record{kind: bpf.SockEventKindEVENT_DEVICE, socket: Socket{Cookie: cookie, Protocol: protocol, Device: device, Observed: 5}}
	}
	m := newModel()
	if _, ok, need := m.apply(moved(port.TCP, 1, 2)); ok || need != 0 {
		t.Errorf("a socket that is not known: %v, needs %b", ok, need)
	}
	known := tcpRow(1).socket
	known.PID, known.Comm = 7, "web"
	m.put(known)
	e, ok, _ := m.apply(moved(port.TCP, 1, 2))
	if want := known; !ok || e.Socket.Device != 2 || e.Socket.PID != want.PID || e.Socket.Port != want.Port {
		t.Errorf("%v, %+v", ok, e)
	}
	if _, ok, _ := m.apply(moved(port.TCP, 1, 2)); ok {
		t.Error("the same interface is reported twice")
	}

	m.begin()
	m.apply(moved(port.TCP, 1, 0))
	if _, _, need := m.apply(moved(port.UDP, 9, 2)); need != scopeUDP {
		t.Errorf("a socket that only the running dump knows needs %b", need)
	}
	old := tcpRow(1)
	old.socket.Device = 2
	if changes := m.merge([]row{old}, nil); len(changes) != 0 || m.sockets[1].socket.Device != 0 {
		t.Errorf("an older row of a dump won: %+v", changes)
	}
	m.end()
}

// What many sockets that came and went leave is less than a tenth of what they took.
func TestMemoryOfSocketsIsFreed(t *testing.T) {
	const n = 50_000
	m := newModel()
	before := heap.Used()
	for cookie := range uint64(n) {
		_, _, _ = m.put(Socket{Cookie: 1 + cookie, Port: 80, Listening: true})
	}
	full := heap.Used() - before
	for cookie := range uint64(n) {
		if _, ok, _ := m.drop(1+cookie, 0); !ok {
			t.Fatalf("socket %d was not there", cookie)
		}
	}
	if left := heap.Used() - before; left > full/10 {
		t.Errorf("%d of %d bytes are left", left, full)
	}
	runtime.KeepAlive(m)
}

// TestInterfaceOfAListenerWithoutPort: it is bound to an interface before a dump has
// its port.
func TestInterfaceOfAListenerWithoutPort(t *testing.T) {
	m := newModel()
	s := tcpRow(1).socket
	s.Port = 0
	m.apply(&record{kind: bpf.SockEventKindEVENT_LISTEN, state: tcpListen, socket: s})
	m.apply(&record{kind: bpf.SockEventKindEVENT_DEVICE, socket: Socket{Cookie: 1, Protocol: port.TCP, Device: 2}})
	m.begin()
	if changes := m.merge([]row{tcpRow(1)}, nil); len(changes) != 1 || changes[0].Socket.Device != 2 {
		t.Errorf("%+v", changes)
	}
}

// What an event without a cookie says of a process counts for the socket that a dump finds then,
// and is looked at as that of any event. Of two processes either may be older.
func TestProcessOfAnEventWithoutCookie(t *testing.T) {
	for _, c := range []struct{ listener, want uint32 }{{7, 7}, {8, 0}} {
		m := newModel()
		bound := Socket{Protocol: port.TCP, Port: 80, Inode: 5, PID: 7, Comm: "a"}
		m.apply(&record{kind: bpf.SockEventKindEVENT_BIND, socket: bound})
		bound.PID = c.listener
		m.apply(&record{kind: bpf.SockEventKindEVENT_LISTEN, socket: bound})
		m.begin()
		m.merge([]row{{socket: Socket{Cookie: 1, Protocol: port.TCP, Port: 80, Inode: 5, Listening: true}}}, nil)
		m.end()
		if _, fresh := m.fresh[1]; m.sockets[1].socket.PID != c.want || fresh != (c.want != 0) {
			t.Errorf("listen by %d: process %d, to be looked at %v; want %d", c.listener, m.sockets[1].socket.PID, fresh, c.want)
		}
	}
}
