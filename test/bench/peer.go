// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/wire"
)

// peer takes the part of the host on a guest's link: it acknowledges all that it
// is told, and notes when.
type peer struct {
	session link.Session
	lost    chan error // why the session ended

	mu    sync.Mutex
	want  map[port.Key]awaited // the next message about a key
	now   map[port.Key]bool    // what stands
	ever  map[port.Key]bool    // what was ever told, if not nil
	last  time.Time            // of the last message that changed something
	added int                  // keys that were told
}

// awaited is a message that is waited for.
type awaited struct {
	owner string // that the publication has, if not empty
	at    chan time.Time
}

// newPeer dials a guest; the caller closes it.
func newPeer(ctx context.Context, g *guest) (*peer, error) {
	at, err := link.ParseEndpoint(g.link)
	if err != nil {
		return nil, err
	}
	p := &peer{lost: make(chan error, 1), want: map[port.Key]awaited{}, now: map[port.Key]bool{}, ever: map[port.Key]bool{}}
	p.session, err = link.Dial(ctx, at, link.Options{
		Role: link.RoleHost, Identity: link.NewIdentity(), Name: "bench", Version: "bench", Logger: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		return nil, err
	}
	go p.read()
	return p, nil
}

func (p *peer) close() { _ = p.session.Close() }

func (p *peer) read() {
	c := p.session.Control()
	in := &arrivals{Reader: c}
	for {
		m, err := wire.ReadControl(in)
		if err != nil {
			p.lost <- fmt.Errorf("the link ended: %w", err)
			return
		}
		at := in.last
		var ack wire.Ack
		switch {
		case m.Snapshot != nil:
			ack.Generation = m.Snapshot.Generation
			ack.Outcomes = p.told(m.Snapshot.Publications, nil, at)
		case m.Change != nil:
			ack.Generation = m.Change.Generation
			ack.Outcomes = p.told(m.Change.Put, m.Change.Removed, at)
		}
		if err := wire.WriteControl(c, wire.Control{Ack: &ack}); err != nil {
			p.lost <- fmt.Errorf("acknowledge: %w", err)
			return
		}
	}
}

// arrivals notes when bytes came: to take a message apart is the reader's time,
// not the link's.
type arrivals struct {
	io.Reader
	last time.Time
}

func (a *arrivals) Read(b []byte) (int, error) {
	n, err := a.Reader.Read(b)
	a.last = time.Now()
	return n, err
}

func (p *peer) told(put []wire.Publication, removed []port.Key, at time.Time) (outcomes []wire.Outcome) {
	p.mu.Lock()
	defer p.mu.Unlock()
	say := func(k port.Key, owner string) {
		p.last = at
		if w, ok := p.want[k]; ok && (w.owner == "" || w.owner == owner) {
			delete(p.want, k)
			w.at <- at
		}
	}
	for _, pub := range put {
		say(pub.Key, pub.Owner.Name)
		if !p.now[pub.Key] {
			p.added++
		}
		p.now[pub.Key], p.ever[pub.Key] = true, true
		outcomes = append(outcomes, wire.Outcome{Key: pub.Key, State: port.Active, HostAddress: pub.Host[0]})
	}
	for _, k := range removed {
		say(k, "")
		delete(p.now, k)
	}
	return outcomes
}

// expect returns where the time of the next message about a key comes.
func (p *peer) expect(k port.Key) <-chan time.Time { return p.expectOf(k, "") }

// expectOf is expect of a message that names the owner.
func (p *peer) expectOf(k port.Key, owner string) <-chan time.Time {
	c := make(chan time.Time, 1)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.want[k] = awaited{owner, c}
	return c
}

// standing is how many keys stand, and when that changed last.
func (p *peer) standing() (n int, last time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.now), p.last
}

// saw says whether a key was ever told.
func (p *peer) saw(k port.Key) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.ever[k]
}

// limit is far beyond what any mode needs on a busy machine.
const limit = 2 * time.Minute

// wait returns when what is expected comes.
func (p *peer) wait(ctx context.Context, said <-chan time.Time) (time.Time, error) {
	select {
	case at := <-said:
		return at, nil
	case err := <-p.lost:
		p.lost <- err // for others that wait
		return time.Time{}, err
	case <-time.After(limit):
		return time.Time{}, fmt.Errorf("nothing within %v", limit)
	case <-ctx.Done():
		return time.Time{}, ctx.Err()
	}
}
