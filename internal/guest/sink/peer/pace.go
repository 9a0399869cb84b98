// SPDX-License-Identifier: Apache-2.0

package peer

import (
	"context"
	"errors"
	"net"
	"time"

	"github.com/fairlead/fairlead/internal/port/schedule"
)

// How often a peer is tried and watched.
const (
	// DialTimeout bounds one attempt to reach a peer.
	DialTimeout = 600 * time.Millisecond
	// downMin and downMax bound the pause between two. It is downMin for the time of
	// restart, so that a peer that restarts has its entries within a second, and grows
	// after that, so that one that is away for long costs little.
	downMin = 300 * time.Millisecond
	downMax = 5 * time.Second
	restart = 10 * time.Second
	// MaxPause is the longest pause after a peer that runs closed a connection.
	MaxPause = 10 * time.Second
	// Farewell bounds the removal of entries at the end.
	Farewell = 3 * time.Second
)

// Through returns a context for one message to a peer, with limit and ctx's
// deadline, but without ctx's cancellation. A message that was begun is finished,
// because otherwise the removal at the end might reach the peer before it.
func Through(ctx context.Context, limit time.Duration) (context.Context, context.CancelFunc) {
	end := time.Now().Add(limit)
	if d, ok := ctx.Deadline(); ok && d.Before(end) {
		end = d
	}
	return context.WithDeadline(context.WithoutCancel(ctx), end)
}

// Pace is the pause before a peer is tried again after it closed a connection: none
// if the connection lasted long, as for a restart, and a longer one each time if it
// did not. Make one with NewPace or NewCautiousPace.
type Pace struct {
	since    time.Time
	pause    schedule.Backoff
	next     time.Duration
	down     schedule.Backoff // between attempts that fail, after the time of restart
	away     time.Time        // when the first of them failed, zero if the last did not
	cautious bool             // an attempt that fails is no reason to try more often
}

// NewPace returns a pace whose first pause is none.
func NewPace() *Pace { return newPace(schedule.Backoff{Min: downMin, Max: MaxPause}) }

func newPace(pause schedule.Backoff) *Pace {
	return &Pace{pause: pause, down: schedule.Backoff{Min: downMin, Max: downMax}}
}

// NewCautiousPace returns a pace for a peer that each attempt may harm: its pauses grow
// to minutes, until a connection lasts.
func NewCautiousPace() *Pace {
	p := newPace(schedule.Backoff{Min: time.Second, Max: cautiousMax})
	p.cautious = true
	return p
}

const cautiousMax = 5 * time.Minute

// Begin notes that a connection was made, or (up is false) that none could be.
func (p *Pace) Begin(up bool) {
	p.since = time.Now()
	switch {
	case up:
		p.away = time.Time{}
		p.down.Reset()
	case !p.cautious:
		p.reset()
	}
}

// Down waits after an attempt that failed, at most until ctx ends.
func (p *Pace) Down(ctx context.Context) {
	if p.away.IsZero() {
		p.away = time.Now()
	}
	pause := downMin
	if time.Since(p.away) >= restart {
		pause = p.down.Next()
	}
	_ = schedule.Sleep(ctx, pause)
}

func (p *Pace) reset() {
	p.pause.Reset()
	p.next = 0
}

// End waits after a connection was closed, at most until ctx ends.
func (p *Pace) End(ctx context.Context) {
	if time.Since(p.since) >= MaxPause {
		p.reset()
		return
	}
	_ = schedule.Sleep(ctx, p.next)
	p.next = p.pause.Next()
}

// Cause returns an error without the address that a dialer puts before it.
func Cause(err error) error {
	var op *net.OpError
	if errors.As(err, &op) {
		return op.Err
	}
	return err
}
