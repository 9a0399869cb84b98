// SPDX-License-Identifier: Apache-2.0

package peer

import (
	"context"
	"errors"
	"net"
	"time"

	"github.com/fairlead/fairlead/internal/schedule"
)

// How often a peer is looked for and looked at.
const (
	// DialTimeout bounds one attempt to reach a peer, and DownPause is between two:
	// together they are less than the second within which a peer that comes back
	// is to be served again.
	DialTimeout = 600 * time.Millisecond
	DownPause   = 300 * time.Millisecond
	// MaxPause is between looks at a peer that ends connections though it lives.
	MaxPause = 10 * time.Second
	// Farewell bounds what is taken back at the end.
	Farewell = 3 * time.Second
)

// Through bounds one thing that is said to a peer: by limit and by ctx's deadline,
// but not by its cancellation. What has been begun is seen to its end, for else
// what is taken back as we leave may overtake it at the peer.
func Through(ctx context.Context, limit time.Duration) (context.Context, context.CancelFunc) {
	end := time.Now().Add(limit)
	if d, ok := ctx.Deadline(); ok && d.Before(end) {
		end = d
	}
	return context.WithDeadline(context.WithoutCancel(ctx), end)
}

// Pace spaces out the looks at a peer each time that it ends a connection: at
// once if the connection was held for long, as a restart wants it, and ever
// slower if it was not. Make one with NewPace.
type Pace struct {
	since time.Time
	pause schedule.Backoff
	next  time.Duration
}

// NewPace returns a pace that begins without a pause.
func NewPace() *Pace { return &Pace{pause: schedule.Backoff{Min: DownPause, Max: MaxPause}} }

// Begin notes the begin of a connection, or that the peer is gone.
func (p *Pace) Begin(up bool) {
	p.since = time.Now()
	if !up {
		p.reset()
	}
}

func (p *Pace) reset() {
	p.pause.Reset()
	p.next = 0
}

// End waits as long as the connection that ended calls for, or until ctx ends.
func (p *Pace) End(ctx context.Context) {
	if time.Since(p.since) >= MaxPause {
		p.reset()
		return
	}
	_ = schedule.Sleep(ctx, p.next)
	p.next = p.pause.Next()
}

// Cause is an error without what a dialer puts before it.
func Cause(err error) error {
	var op *net.OpError
	if errors.As(err, &op) {
		return op.Err
	}
	return err
}
