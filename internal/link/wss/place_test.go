// SPDX-License-Identifier: Apache-2.0

package wss

import (
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead/fairlead/internal/link"
)

// mute is a connection that reads nothing once it is frozen, until it is closed.
type mute struct {
	net.Conn
	frozen atomic.Bool
	once   sync.Once
	closed chan struct{}
}

func (m *mute) Read(b []byte) (int, error) {
	n, err := m.Conn.Read(b)
	if m.frozen.Load() {
		<-m.closed
		return 0, net.ErrClosed
	}
	return n, err
}

func (m *mute) Close() error {
	m.once.Do(func() { close(m.closed) })
	return m.Conn.Close()
}

// end is both ends of a session with a process of its own.
type end struct {
	host, agent link.Session
	conn        *mute // of the agent
}

func newEnd(t *testing.T) end {
	t.Helper()
	near, far := net.Pipe()
	e := end{conn: &mute{Conn: far, closed: make(chan struct{})}}
	connect := func(role link.Role) link.Options {
		o := options(role)
		o.Token = token(t, "k")
		return o
	}
	var wg sync.WaitGroup
	var aerr error
	wg.Go(func() { e.agent, aerr = link.Client(t.Context(), e.conn, connect(link.RoleAgent)) })
	var err error
	e.host, err = link.Server(t.Context(), near, connect(link.RoleHost))
	wg.Wait()
	if err != nil || aerr != nil {
		t.Fatal(err, aerr)
	}
	return e
}

func (e end) close() { _, _ = e.agent.Close(), e.host.Close() }

// withMutePlace runs a test in fake time with a place whose session does not answer, and
// sessions to offer.
func withMutePlace(t *testing.T, test func(p *place, old end, offered []end, wg *sync.WaitGroup)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		p := newPlace()
		old := newEnd(t)
		if err := p.offer(old.host); err != nil {
			t.Fatal(err)
		}
		synctest.Wait() // else the first ping of the session may be answered yet
		old.conn.frozen.Store(true)
		var wg sync.WaitGroup
		var offered []end
		for range 4 {
			e := newEnd(t)
			offered = append(offered, e)
			wg.Go(func() { _ = p.offer(e.host) })
			synctest.Wait()
		}
		test(p, old, offered, &wg)
		wg.Wait()
		p.close()
		old.close()
		for _, e := range offered {
			e.close()
		}
	})
}

func wantEnded(t *testing.T, list []end, want ...bool) {
	t.Helper()
	for i, e := range list {
		if ended := e.host.Err() != nil; ended != want[i] {
			t.Errorf("session %d: ended is %v", i, ended)
		}
	}
}

// While a session is offered one more waits, however many come.
func TestOneOfferWaits(t *testing.T) {
	withMutePlace(t, func(p *place, old end, offered []end, wg *sync.WaitGroup) {
		wantEnded(t, offered, false, true, true, false)
		wg.Wait()
		wantEnded(t, offered, false, true, true, true) // the first took the name, and answers
		if old.host.Err() == nil {
			t.Error("the silent session is open")
		}
		if s, err := p.take(t.Context()); err != nil || s != offered[0].host {
			t.Errorf("took another one, %v", err)
		}
	})
}

// The end of a server does not wait for a session that does not answer.
func TestPlaceClosesAtOnce(t *testing.T) {
	withMutePlace(t, func(p *place, _ end, offered []end, wg *sync.WaitGroup) {
		began := time.Now()
		p.close()
		wg.Wait()
		if took := time.Since(began); took > aliveTime/2 {
			t.Errorf("closed after %v", took)
		}
		wantEnded(t, offered, true, true, true, true)
	})
}

// A session that ends while it is offered takes nobody's place.
func TestEndedOfferReplacesNothing(t *testing.T) {
	withMutePlace(t, func(p *place, old end, offered []end, wg *sync.WaitGroup) {
		for _, e := range offered {
			_ = e.agent.Close()
		}
		wg.Wait()
		if old.host.Err() != nil {
			t.Error("the session before was closed")
		}
		if p.next() != old.host {
			t.Error("another session waits")
		}
	})
}
