// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/replica"
	inner "github.com/fairlead/fairlead/internal/table"
	"github.com/fairlead/fairlead/internal/wire"
)

// peer is the host end of a guest's link. It acknowledges every message and notes
// when it came.
type peer struct {
	session link.Session
	ended   chan struct{} // closed when the session has ended
	why     error         // of the end

	mu   sync.Mutex
	want map[port.Key]awaited
	now  map[port.Key]bool // published now
	ever map[port.Key]bool // published at some time
	last time.Time         // of the last message that changed something
}

// awaited is a message that somebody waits for.
type awaited struct {
	owner string // that the publication must have, if not empty
	gone  bool   // it must have been withdrawn
	at    chan time.Time
}

// newPeer dials a guest; the caller closes its session.
func newPeer(ctx context.Context, address string) (*peer, error) {
	at, err := link.ParseEndpoint(address)
	if err != nil {
		return nil, err
	}
	p := &peer{ended: make(chan struct{}), want: map[port.Key]awaited{}, now: map[port.Key]bool{}, ever: map[port.Key]bool{}}
	d, err := link.NewDialer(at, link.Options{
		Role: link.RoleHost, Identity: link.NewIdentity(), Name: "bench", Version: "bench", Logger: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		return nil, err
	}
	if p.session, err = d.Dial(ctx); err != nil {
		return nil, err
	}
	go func() {
		defer close(p.ended)
		p.why = fmt.Errorf("the link ended: %w", p.serve())
	}()
	return p, nil
}

func (p *peer) serve() error {
	answers := inner.New[port.Key, port.Publication](port.Key.Compare)
	in := &arrivals{Control: p.session.Control()}
	s := replica.New(in, replica.Options{})
	replica.Receive(s, replica.Wanted(), func(step replica.Step[port.Key, wire.Publication]) error {
		removed := step.Removed
		if step.Whole {
			named := make(map[port.Key]bool)
			for _, pub := range step.Put {
				named[pub.Key] = true
			}
			for k := range answers.View().All() {
				if !named[k] {
					removed = append(removed, k)
				}
			}
		}
		answers.Update(func(tx *inner.Tx[port.Key, port.Publication]) {
			for _, pub := range step.Put {
				tx.Put(pub.Key, pub.Port())
			}
			for _, k := range removed {
				tx.Delete(k)
			}
		})
		p.receive(step.Put, removed, in.last)
		return nil
	})
	ignore(s, replica.Unpublished())
	ignore(s, replica.Unread())
	replica.Send(s, replica.Outcomes(), replica.From[port.Key, wire.Answer, port.Key, port.Publication]{
		Table: answers, Key: func(k port.Key) port.Key { return k },
		Row: func(pub port.Publication) wire.Answer {
			return wire.FromOutcomes(pub.Key, []port.Outcome{{State: port.Active, HostAddress: pub.Decision.Host[0]}})
		},
	})
	return s.Run(context.Background())
}

func ignore[K comparable, V any](s *replica.Session, kind replica.Kind[K, V]) {
	replica.Receive(s, kind, func(replica.Step[K, V]) error { return nil })
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

func (p *peer) receive(put []wire.Publication, removed []port.Key, at time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(put)+len(removed) > 0 {
		p.last = at
	}
	for _, pub := range put {
		p.notify(pub.Key, pub.Owner.Name, false, at)
		p.now[pub.Key], p.ever[pub.Key] = true, true
	}
	for _, k := range removed {
		p.notify(k, "", true, at)
		delete(p.now, k)
	}
}

// notify requires p.mu.
func (p *peer) notify(k port.Key, owner string, gone bool, at time.Time) {
	if w, ok := p.want[k]; ok && w.gone == gone && (w.owner == "" || w.owner == owner) {
		delete(p.want, k)
		w.at <- at
	}
}

// expect returns a function that waits for the next message that publishes a key, of this
// owner if that is not empty, and returns the time of its arrival.
func (p *peer) expect(k port.Key, owner string) wait { return p.await(k, awaited{owner: owner}) }

// expectGone is expect for the message that withdraws a key.
func (p *peer) expectGone(k port.Key) wait { return p.await(k, awaited{gone: true}) }

func (p *peer) await(k port.Key, w awaited) wait {
	w.at = make(chan time.Time, 1)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.want[k] = w
	return func(ctx context.Context) (at time.Time) {
		select {
		case at = <-w.at:
		case <-p.ended:
			check(p.why)
		case <-time.After(limit):
			check(fmt.Errorf("%s was not seen within %v", k, limit))
		case <-ctx.Done():
			check(ctx.Err())
		}
		return at
	}
}

func (p *peer) saw(k port.Key) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.ever[k]
}

// settle waits until there are n publications, among them these ports, and returns when
// the last message came.
func (p *peer) settle(ctx context.Context, n int, ports ...uint16) (last time.Time) {
	check(eventually(ctx, func() error {
		select {
		case <-p.ended:
			check(p.why)
		default:
		}
		p.mu.Lock()
		defer p.mu.Unlock()
		last = p.last
		misses := slices.ContainsFunc(ports, func(n uint16) bool { return !p.now[tcpKey(n)] })
		if len(p.now) != n || misses {
			return fmt.Errorf("%d publications, want %d", len(p.now), n)
		}
		return nil
	}))
	return last
}

// tcpKey is the key of a listener at 127.0.0.1.
func tcpKey(p uint16) port.Key {
	return port.Key{Protocol: port.TCP, Address: netip.AddrFrom4([4]byte{127, 0, 0, 1}), Port: p}
}

// natKey is the key of a port that a NAT rule opens.
func natKey(p uint16) port.Key {
	return port.Key{Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: p}
}
