// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead/fairlead/internal/link/own"
	"github.com/fairlead/fairlead/internal/port"
)

// memory is a Network without sockets, which would stop fake time. Addresses in taken
// are held by another process.
type memory struct {
	mu    sync.Mutex
	start time.Time
	taken map[string]bool
	tries []time.Duration
	open  map[string]*memoryListener
}

func newMemory() *memory {
	return &memory{start: time.Now(), taken: make(map[string]bool), open: make(map[string]*memoryListener)}
}

func (m *memory) Listen(_ context.Context, network, address string) (net.Listener, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.tries = append(m.tries, time.Since(m.start))
	if m.taken[address] || m.open[address] != nil {
		return nil, &net.OpError{Op: "listen", Net: network, Err: errTaken}
	}
	l := &memoryListener{m: m, addr: netip.MustParseAddrPort(address), conns: make(chan net.Conn), done: make(chan struct{})}
	m.open[address] = l
	return l, nil
}

func (m *memory) ListenPacket(context.Context, string, string) (*own.UDPConn, error) {
	return nil, errors.ErrUnsupported
}

func (m *memory) take(address string, taken bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.taken[address] = taken
}

func (m *memory) isOpen(a netip.AddrPort) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.open[a.String()] != nil
}

// dial connects to an address that is open.
func (m *memory) dial(t *testing.T, a netip.AddrPort) net.Conn {
	t.Helper()
	m.mu.Lock()
	l := m.open[a.String()]
	m.mu.Unlock()
	if l == nil {
		t.Fatalf("%s is not open", a)
	}
	near, far := net.Pipe()
	l.conns <- far
	return near
}

type memoryListener struct {
	m     *memory
	addr  netip.AddrPort
	conns chan net.Conn
	done  chan struct{}
}

func (l *memoryListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}

func (l *memoryListener) Close() error {
	l.m.mu.Lock()
	defer l.m.mu.Unlock()
	delete(l.m.open, l.addr.String())
	close(l.done)
	return nil
}

func (l *memoryListener) Addr() net.Addr { return net.TCPAddrFromAddrPort(l.addr) }

func TestGraceAndHoldInTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAgent(t, "vm")
		k := key(port.TCP, any4, 80)
		a.begins(snapshot(1, pub(k)))
		network := newMemory()
		h, stop := start(t, Options{Network: network}, a)
		synctest.Wait()
		if !network.isOpen(at(lo4, 80)) {
			t.Fatal("not open")
		}

		// A loss shorter than the grace period closes nothing.
		a.drop(errors.New("gone"))
		time.Sleep(9 * time.Second)
		a.up()
		time.Sleep(2 * time.Second)
		synctest.Wait()
		if !network.isOpen(at(lo4, 80)) || !h.Guests()[0].Connected || len(network.tries) != 1 {
			t.Error("a short loss closed the listener")
		}

		// Without a link a connection waits for 3 seconds.
		a.drop(errors.New("gone"))
		synctest.Wait()
		began := time.Now()
		c := network.dial(t, at(lo4, 80))
		if _, err := c.Read(make([]byte, 1)); err == nil {
			t.Error("read gave no error")
		}
		if got := time.Since(began); got != 3*time.Second {
			t.Errorf("the connection was held for %v, want 3 s", got)
		}

		// At the end of the grace period, and not before, the listener is closed.
		time.Sleep(7*time.Second - time.Millisecond)
		synctest.Wait()
		if !network.isOpen(at(lo4, 80)) {
			t.Error("closed before the end of the grace period")
		}
		time.Sleep(time.Millisecond)
		synctest.Wait()
		if network.isOpen(at(lo4, 80)) {
			t.Error("open after the grace period")
		}
		stop()
	})
}

func TestConflictIsRetriedInTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAgent(t, "vm")
		k := key(port.TCP, any4, 80)
		a.begins(snapshot(1, pub(k)))
		network := newMemory()
		network.take("127.0.0.1:80", true)
		_, stop := start(t, Options{Network: network}, a)
		time.Sleep(time.Minute)
		synctest.Wait()
		network.mu.Lock()
		tries := slices.Clone(network.tries)
		network.mu.Unlock()
		for i := 1; i < len(tries); i++ {
			if gap := tries[i] - tries[i-1]; gap > conflictMax {
				t.Errorf("%v between attempts, want at most %v", gap, conflictMax)
			}
		}
		if n := len(tries); n < 8 || n > 14 {
			t.Errorf("%d attempts in a minute: %v", n, tries)
		}
		network.take("127.0.0.1:80", false)
		time.Sleep(conflictMax)
		synctest.Wait()
		if o := a.heard(k); len(o) != 1 || o[0].State != port.Active {
			t.Errorf("outcome = %+v, want active", o)
		}
		stop()
	})
}

// A wildcard that cannot be opened leaves the narrower address of its server open.
func TestTakenWildcardLeavesLoopback(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAgent(t, "vm")
		owner := port.Owner{Kind: port.OwnerProcess, ID: "1", Name: "web"}
		narrow, wide := pub(key(port.TCP, lo4, 80), at(lo4, 80)), pub(key(port.TCP, any4, 80), at(any4, 80))
		narrow.Owner, wide.Owner = owner, owner
		a.begins(snapshot(1, narrow))
		network := newMemory()
		network.take("0.0.0.0:80", true)
		_, stop := start(t, Options{Network: network, Policy: exposeAll(t)}, a)
		synctest.Wait()
		a.say(put(1, wide))
		synctest.Wait()
		check := func(when string, narrowOpen bool, state port.State) {
			t.Helper()
			if n, w := a.heard(narrow.Key)[0], a.heard(wide.Key)[0]; n.State != port.Active || w.State != state {
				t.Errorf("%s: loopback %v %q, wildcard %v %q", when, n.State, n.Reason, w.State, w.Reason)
			}
			if network.isOpen(at(lo4, 80)) != narrowOpen {
				t.Errorf("%s: the loopback is open: %t, want %t", when, !narrowOpen, narrowOpen)
			}
		}
		check("at first", true, port.Conflict)
		network.mu.Lock()
		tries := len(network.tries)
		network.mu.Unlock()
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		check("later", true, port.Conflict)
		network.mu.Lock()
		if n := len(network.tries) - tries; n < 4 || n > 14 {
			t.Errorf("%d attempts in 10 minutes: the loopback is closed for each", n)
		}
		network.mu.Unlock()
		a.say(put(2, narrow)) // some change of the group
		synctest.Wait()
		check("after a change", true, port.Conflict)

		network.take("0.0.0.0:80", false)
		time.Sleep(besideMax)
		synctest.Wait()
		check("when it is free", false, port.Active)
		network.take("127.0.0.1:80", true)
		a.say(removed(3, wide.Key))
		synctest.Wait()
		if n := a.heard(narrow.Key)[0]; n.State != port.Conflict {
			t.Errorf("the loopback is %v although it is taken", n.State)
		}
		stop()
	})
}

// once names a holder at the first look only.
type once struct{ looks atomic.Int32 }

func (o *once) Holders(ctx context.Context, sockets []Socket) (map[Socket]Holder, error) {
	if o.looks.Add(1) > 1 {
		return nil, nil
	}
	return named{Holder{PID: 7, Name: "nginx"}}.Holders(ctx, sockets)
}

// A holder that cannot be found any more is no longer named.
func TestHolderIsForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAgent(t, "vm")
		k := key(port.TCP, any4, 80)
		a.begins(snapshot(1, pub(k)))
		network := newMemory()
		network.take("127.0.0.1:80", true)
		_, stop := start(t, Options{Network: network, Holders: new(once)}, a)
		synctest.Wait()
		if o := a.heard(k)[0]; !strings.Contains(o.Reason.String(), "nginx") {
			t.Errorf("reason %q, want the holder", o.Reason)
		}
		time.Sleep(holderAge + 3*conflictMax)
		synctest.Wait()
		if o := a.heard(k)[0]; o.State != port.Conflict || strings.Contains(o.Reason.String(), "nginx") {
			t.Errorf("outcome %v %q, want a conflict without the old holder", o.State, o.Reason)
		}
		stop()
	})
}

// What is known of a port stays the same over further attempts.
func TestReservedRangeStaysFailed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAgent(t, "vm")
		k := key(port.TCP, any4, 80)
		a.begins(snapshot(1, pub(k)))
		network := newMemory()
		network.take("127.0.0.1:80", true)
		by := named{Holder{Name: "Windows", Reserved: PortRange{50, 100}}}
		_, stop := start(t, Options{Network: network, Holders: by}, a)
		for range 30 {
			time.Sleep(time.Second)
			synctest.Wait()
			if o := a.heard(k)[0]; o.State != port.Failed || !strings.Contains(o.Reason.String(), "reserves") {
				t.Fatalf("outcome %v %q, want failed as the range is reserved", o.State, o.Reason)
			}
		}
		stop()
	})
}

func TestGuestIsDialledWithBackoff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAgent(t, "vm")
		a.drop(errors.New("nobody there"))
		a.begins(snapshot(1))
		h, stop := start(t, Options{BackoffMin: 100 * time.Millisecond, BackoffMax: 10 * time.Second}, a)
		time.Sleep(10 * time.Minute)
		a.mu.Lock()
		dials := a.dials
		a.mu.Unlock()
		// Waits of 5 to 10 seconds, after the first few.
		if dials < 60 || dials > 130 {
			t.Errorf("%d attempts in 10 minutes", dials)
		}
		a.up()
		time.Sleep(10 * time.Second)
		synctest.Wait()
		if !h.Guests()[0].Connected {
			t.Error("not connected within the longest wait")
		}
		stop()
	})
}

func TestSilentGuestIsDisconnected(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAgent(t, "vm") // it never sends a snapshot
		_, stop := start(t, Options{}, a)
		time.Sleep(snapshotTimeout + time.Second)
		synctest.Wait()
		a.mu.Lock()
		dials := a.dials
		a.mu.Unlock()
		if dials != 2 {
			t.Errorf("%d sessions, want a second after %v", dials, snapshotTimeout)
		}
		stop()
	})
}

// A host at rest is not woken: the link's keep-alive is the only timer.
func TestNoTimerAtRest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAgent(t, "vm")
		k := key(port.TCP, any4, 80)
		a.begins(snapshot(1, pub(k)))
		h, stop := start(t, Options{Network: newMemory()}, a)
		synctest.Wait()
		if next := h.next(); !next.IsZero() {
			t.Errorf("something is due at %v", next)
		}
		stop()
	})
}
