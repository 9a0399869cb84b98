// SPDX-License-Identifier: Apache-2.0

//go:build linux && root

package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/guest/kernel"
	"github.com/fairlead/fairlead/internal/guest/kernel/bpf"
	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/link/replica"
	"github.com/fairlead/fairlead/internal/link/wire"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/table"
	"github.com/fairlead/fairlead/internal/testkit/netns"
)

// peer is the host end of a guest's link. It acknowledges every message and notes when it came.
type peer struct {
	mu   sync.Mutex
	now  map[port.Key]bool // published
	last time.Time         // of the last message that changed something
	want port.Key
	gone bool
	at   chan time.Time // of the message about want: published, or gone
}

func dialPeer(b *testing.B, address string) (*peer, error) {
	endpoint, err := link.ParseEndpoint(address)
	if err != nil {
		return nil, err
	}
	d, err := link.NewDialer(endpoint, link.Options{
		Role: link.RoleHost, Identity: link.NewIdentity(), Name: "bench", Version: "bench", Logger: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		return nil, err
	}
	session, err := d.Dial(b.Context())
	if err != nil {
		return nil, err
	}
	b.Cleanup(func() { _ = session.Close() })
	p := &peer{now: make(map[port.Key]bool), at: make(chan time.Time, 1)}
	go p.serve(b.Context(), session.Control())
	return p, nil
}

// serve returns when the link ends; what is waited for then does not come.
func (p *peer) serve(ctx context.Context, c link.Control) {
	answers := table.New[port.Key, port.Fact](port.Key.Compare)
	in := &arrivals{Control: c}
	s := replica.New(in, replica.Options{})
	replica.Receive(s, replica.Wanted(), func(step replica.Step[port.Key, port.Fact]) error {
		answers.Update(func(tx *table.Tx[port.Key, port.Fact]) {
			for _, pub := range step.Put {
				tx.Put(pub.Key, pub)
			}
			for _, k := range step.Removed {
				tx.Delete(k)
			}
		})
		p.receive(step.Put, step.Removed, in.last)
		return nil
	})
	replica.Receive(s, replica.Unpublished(), func(replica.Step[port.Key, port.Fact]) error { return nil })
	replica.Receive(s, replica.Unread(), func(replica.Step[wire.Unread, wire.Unread]) error { return nil })
	replica.Send(s, replica.Outcomes(), replica.From[port.Key, port.Answer, port.Key, port.Fact]{
		Table: answers, Key: func(k port.Key) port.Key { return k },
		Row: func(pub port.Fact) port.Answer {
			return port.NewAnswer(pub.Key, []port.Outcome{{State: port.Active, HostAddress: pub.Decision.Host[0]}})
		},
	})
	_ = s.Run(ctx)
}

// arrivals notes when a message came, because decoding is not the link's time.
type arrivals struct {
	link.Control
	last time.Time
}

func (a *arrivals) Read(ctx context.Context) ([]byte, error) {
	b, err := a.Control.Read(ctx)
	a.last = time.Now()
	return b, err
}

func (p *peer) receive(put []port.Fact, removed []port.Key, at time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(put)+len(removed) > 0 {
		p.last = at
	}
	for _, pub := range put {
		p.now[pub.Key] = true
		p.notify(pub.Key, false, at)
	}
	for _, k := range removed {
		delete(p.now, k)
		p.notify(k, true, at)
	}
}

func (p *peer) notify(k port.Key, gone bool, at time.Time) {
	if k == p.want && gone == p.gone {
		p.want = port.Key{}
		p.at <- at
	}
}

// expect returns a function that waits for the next message that publishes a key, or withdraws it.
func (p *peer) expect(k port.Key, gone bool) func(testing.TB) time.Time {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.want, p.gone = k, gone
	return func(t testing.TB) time.Time { return arrived(t, p.at) }
}

func arrived(t testing.TB, at <-chan time.Time) time.Time {
	select {
	case when := <-at:
		return when
	case <-time.After(time.Minute):
		t.Fatal("no message about the port came")
		return time.Time{}
	}
}

// settle waits until n ports are published, and returns when the last message came. It fails if
// one was lost. A dual-stack listener may be two of them.
func (p *peer) settle(t testing.TB, n int) (last time.Time) {
	eventually(t, 5*time.Millisecond, func() error {
		p.mu.Lock()
		defer p.mu.Unlock()
		if last = p.last; len(p.now) < n {
			return fmt.Errorf("%d publications, want %d", len(p.now), n)
		}
		return nil
	})
	return last
}

// raw is the machine's own price of a message: a program of its own that reads the agent's event
// from the kernel and writes one message to a unix socket, and does nothing else.
type raw struct {
	space *netns.Space
	at    chan time.Time
}

// messageSize is that of the agent's message about one port.
const messageSize = 300

func newRaw(b *testing.B) *raw {
	r := &raw{space: space(b), at: make(chan time.Time, 16)}
	path := filepath.Join(b.TempDir(), "s")
	l := must(net.Listen("unix", path))(b)
	b.Cleanup(func() { _ = l.Close() })
	p := (&guest{b: b}).become(r.space, "raw "+path)
	go func() { <-p.Done(); _ = l.Close() }()
	c := must(l.Accept())(b)
	b.Cleanup(func() { _ = c.Close() })
	must(io.ReadFull(c, make([]byte, messageSize)))(b) // it is attached
	go func() {
		for buf := make([]byte, messageSize); ; {
			if _, err := io.ReadFull(c, buf); err != nil {
				return
			}
			r.at <- time.Now()
		}
	}()
	return r
}

// rawReader is that program.
func rawReader(path string) error {
	ns, err := kernel.OpenNamespace()
	if err != nil {
		return err
	}
	pids, err := kernel.PIDNamespace()
	if err != nil {
		return err
	}
	o, err := kernel.Open(nil, kernel.Config{
		Files:     []kernel.File{bpf.LoadSock, bpf.LoadSockKprobes},
		Constants: map[string]any{bpf.SockVarNetworkNamespace: ns.Inode(), bpf.SockVarPidNamespace: pids},
		Maps:      []string{bpf.SockMapEvents, bpf.SockMapTracked, bpf.SockMapControls, bpf.SockMapLosses},
	})
	if err != nil {
		return err
	}
	ring, err := o.Ring(bpf.SockMapEvents, bpf.SockMapControls)
	if err != nil {
		return err
	}
	ring.Control().Open.Store(1)
	if err := o.Attach([]string{"tcp_state_stop", "tcp_listen_start"}); err != nil {
		if err := o.Attach([]string{"tcp_state"}); err != nil {
			return err
		}
	}
	c, err := net.Dial("unix", path)
	if err != nil {
		return err
	}
	message := make([]byte, messageSize)
	_, err = c.Write(message)
	for err == nil {
		if err = ring.Wait(0); err != nil {
			break
		}
		var failed error
		_, err = ring.Read(1000, func([]byte) { _, failed = c.Write(message) })
		err = errors.Join(err, failed)
	}
	return err
}

// sample opens a listener and closes it, and returns how long the first message of each took.
func (r *raw) sample(b *testing.B, p int) (opened, closed time.Duration) {
	quiet := func() {
		pause()
		for len(r.at) > 0 { // a socket may end by two events
			<-r.at
		}
	}
	var fd int
	var at time.Time
	quiet()
	check(b, r.space.Do(func() (err error) { fd, at, err = listen(p, false); return err }))
	opened = arrived(b, r.at).Sub(at)
	quiet()
	at = time.Now()
	_ = unix.Close(fd)
	return opened, arrived(b, r.at).Sub(at)
}
