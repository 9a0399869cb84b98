// SPDX-License-Identifier: Apache-2.0

//go:build linux

package observer

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead/fairlead/internal/guest/kernel/bpf"
	"github.com/fairlead/fairlead/internal/port"
)

// overflowRing is the number of events that the ring of these tests holds: more
// than the reader takes before the dump begins.
const overflowRing = 5 * batchLimit

// describe returns what does not differ between runs.
func describe(s Socket) string {
	d := fmt.Sprintf("%v %v", s.Protocol, netip.AddrPortFrom(s.Address, s.Port))
	if s.V6Only {
		d += " v6only"
	}
	if !s.Listening {
		d += " bound"
	}
	return d
}

// randomKernel makes random changes to the sockets of a rig. It reports them as the
// hooks do: the end of a socket only if it is tracked, and nothing that the ring has
// no room for.
type randomKernel struct {
	*rig
	rng   *rand.Rand
	next  uint64
	open  []uint64 // cookies of open sockets, with those that a peer hides
	kind  map[uint64]port.Protocol
	lossy bool // the ring is full, or will be
}

func (k *randomKernel) send(event bpf.SockEvent) {
	k.source.mu.Lock()
	full := len(k.source.queue) >= overflowRing
	k.source.mu.Unlock()
	if full {
		k.source.lose()
		return
	}
	k.source.send(event)
}

// end removes a socket from the table. It reports the end if the socket is tracked
// or a listener.
func (k *randomKernel) end(event bpf.SockEvent) {
	listener := k.listening(event.Cookie)
	k.hide(event.Cookie)
	k.source.mu.Lock()
	known := listener || k.source.opened || k.source.tracked[event.Cookie]
	delete(k.source.tracked, event.Cookie)
	k.source.mu.Unlock()
	if known {
		k.send(event)
	}
}

// report puts a socket into the table and reports the event.
func (k *randomKernel) report(event bpf.SockEvent, listening bool) {
	w := tcpRow(event.Cookie)
	w.socket.Protocol, w.socket.Listening = port.Protocol(event.Protocol), listening
	k.edit(func() {
		w.socket.Device = k.table[event.Cookie].socket.Device
		k.table[event.Cookie] = w
	})
	event.Device = w.socket.Device
	if !listening || w.socket.Protocol == port.UDP {
		_ = k.source.track(event.Cookie)
	}
	k.send(event)
}

// listening reports whether a socket is a TCP listener.
func (k *randomKernel) listening(cookie uint64) (yes bool) {
	k.edit(func() {
		s := k.table[cookie].socket
		yes = s.Protocol == port.TCP && s.Listening
	})
	return yes
}

func (k *randomKernel) hide(cookie uint64) { k.edit(func() { delete(k.table, cookie) }) }

// add makes a socket.
func (k *randomKernel) add() {
	k.next++
	cookie := k.next
	k.open = append(k.open, cookie)
	if k.rng.IntN(8) == 0 {
		k.addWithoutCookie(cookie)
		return
	}
	if k.rng.IntN(3) == 0 {
		k.kind[cookie] = port.UDP
		k.report(udpEvent(bpf.SockEventKindEVENT_BIND, cookie), true)
		return
	}
	k.kind[cookie] = port.TCP
	if k.rng.IntN(4) == 0 { // listen without bind: the port is chosen later
		e := tcpEvent(bpf.SockEventKindEVENT_LISTEN, cookie)
		e.Port = 0
		k.report(e, true)
		return
	}
	k.report(tcpEvent(bpf.SockEventKindEVENT_BIND, cookie), false)
}

// addWithoutCookie makes a UDP socket whose bind a kprobe reports: the kernel has no
// cookie for it before a dump.
func (k *randomKernel) addWithoutCookie(cookie uint64) {
	k.kind[cookie] = port.UDP
	k.edit(func() { k.table[cookie] = udpRow(cookie) })
	e := udpEvent(bpf.SockEventKindEVENT_BIND, 0)
	e.Port, e.Inode = uint16(1000+cookie), uint32(cookie)
	k.send(e)
}

// change makes a random change.
func (k *randomKernel) change(most int) {
	if len(k.open) == 0 || len(k.open) < 28 || len(k.open) < most && k.rng.IntN(2) == 0 {
		k.add()
		return
	}
	at := k.rng.IntN(len(k.open))
	cookie := k.open[at]
	if k.rng.IntN(8) == 0 {
		k.setDevice(cookie)
		return
	}
	if k.rng.IntN(3) == 0 || len(k.open) > most {
		k.close(at)
		return
	}
	if k.kind[cookie] == port.UDP {
		k.changeUDP(cookie)
		return
	}
	k.changeTCP(cookie)
}

// setDevice binds a socket to another interface, or to none.
func (k *randomKernel) setDevice(cookie uint64) {
	device, there := uint32(k.rng.IntN(3)), false
	k.edit(func() {
		w, ok := k.table[cookie]
		if there = ok; ok {
			w.socket.Device = device
			k.table[cookie] = w
		}
	})
	k.source.mu.Lock()
	known := k.source.opened || k.source.tracked[cookie]
	k.source.mu.Unlock()
	if there && (known || k.listening(cookie)) {
		e := bpf.SockEvent{
			Kind: uint8(bpf.SockEventKindEVENT_DEVICE), Protocol: uint8(k.kind[cookie]), Cookie: cookie, Observed: 1, Device: device,
		}
		k.send(e)
	}
}

func (k *randomKernel) close(at int) {
	cookie := k.open[at]
	k.open = slices.Delete(k.open, at, at+1)
	e := tcpEvent(bpf.SockEventKindEVENT_CLOSE, cookie)
	e.Protocol = uint8(k.kind[cookie])
	k.end(e)
}

func (k *randomKernel) changeUDP(cookie uint64) {
	switch k.rng.IntN(4) {
	case 0: // bind, or the peer is removed
		k.report(udpEvent(bpf.SockEventKindEVENT_BIND, cookie), true)
	case 1:
		if !k.lossy {
			return
		}
		// The peer is removed, and no hook reports it.
		k.edit(func() { k.table[cookie] = udpRow(cookie) })
	case 2:
		k.end(udpEvent(bpf.SockEventKindEVENT_CONNECT, cookie))
	default:
		k.send(udpEvent(bpf.SockEventKindEVENT_CHECK, cookie))
		if k.rng.IntN(2) == 0 {
			k.hide(cookie)
		}
	}
}

func (k *randomKernel) changeTCP(cookie uint64) {
	switch {
	case k.listening(cookie):
		k.report(tcpEvent(bpf.SockEventKindEVENT_UNLISTEN, cookie), false)
	case k.rng.IntN(4) == 0:
		k.end(tcpEvent(bpf.SockEventKindEVENT_CONNECT, cookie))
	default:
		k.report(tcpEvent(bpf.SockEventKindEVENT_LISTEN, cookie), true)
	}
}

// wantTable compares what the handler has with the sockets that there are.
func (k *randomKernel) wantTable(t *testing.T, when string) {
	t.Helper()
	have, want := make(map[uint64]string), make(map[uint64]string)
	k.keeper.mu.Lock()
	for cookie, s := range k.keeper.set {
		have[cookie] = fmt.Sprint(describe(s), s.Device)
	}
	k.keeper.mu.Unlock()
	k.edit(func() {
		for cookie, w := range k.table {
			want[cookie] = fmt.Sprint(describe(w.socket), w.socket.Device)
		}
	})
	if maps.Equal(have, want) {
		return
	}
	for cookie, d := range have {
		if want[cookie] != d {
			t.Errorf("%s: socket %d is %q, want %q", when, cookie, d, want[cookie])
		}
	}
	for cookie, d := range want {
		if _, ok := have[cookie]; !ok {
			t.Errorf("%s: socket %d is missing, want %q", when, cookie, d)
		}
	}
}

// TestRingOverflowIsRepairedWithoutAudit stops the reader until events are lost. The
// events that are still in the ring are older than the dump and must not win over
// it. There is no audit that could repair it.
func TestRingOverflowIsRepairedWithoutAudit(t *testing.T) {
	for seed := range uint64(20) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				r := newRig()
				r.audit = -1
				r.start(t)
				pass(time.Second)
				k := &randomKernel{rig: r, rng: rand.New(rand.NewPCG(seed, 0)), kind: make(map[uint64]port.Protocol)}
				for round := range 3 {
					k.lossy = true
					r.engine.mu.Lock() // stops the reader
					all, _ := r.source.drops()
					for lost := all; lost < all+1+k.rng.Uint64N(300); lost, _ = r.source.drops() {
						k.change(30)
					}
					r.engine.mu.Unlock()
					k.lossy = false
					pass(10 * time.Second)
					k.wantTable(t, fmt.Sprintf("round %d, after the overflow", round))
					for range 25 { // their ends are reported
						k.close(0)
						synctest.Wait()
					}
					pass(10 * time.Second)
					k.wantTable(t, fmt.Sprintf("round %d, when most are closed", round))
				}
			})
		})
	}
}

// TestUncommittedRecordForcesAnotherDump: a program is interrupted in the middle of
// its record while dumps are merged. The record is applied after the dump, although
// it is older, so only another dump can tell what is true.
func TestUncommittedRecordForcesAnotherDump(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(tcpRow(1))
		r.audit = -1
		r.start(t)
		pass(time.Second)
		r.edit(func() { delete(r.table, 1) })
		r.source.begin(tcpEvent(bpf.SockEventKindEVENT_LISTEN, 1)) // an old one
		r.source.lose()                                            // the end of the socket
		pass(time.Second)
		r.source.commit()
		pass(time.Second)
		r.wantCookies(t)
		if r.counters.resyncs.Load() < 2 {
			t.Errorf("%d dumps after losses, want another one", r.counters.resyncs.Load())
		}
	})
}
