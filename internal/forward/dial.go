// SPDX-License-Identifier: Apache-2.0

package forward

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"github.com/fairlead/fairlead/internal/wire"
)

var (
	errNoTarget = errors.New("nothing is known to serve it")
	errOwn      = errors.New("served by fairlead itself")
)

// attemptDelay is how long a target may take to answer until the next one is tried
// beside it ("Connection Attempt Delay", RFC 8305, section 5). A Service's own
// address answers nobody until kube-proxy has its rules, when its node port may.
const attemptDelay = 250 * time.Millisecond

// dial tries the targets in order, and takes the first that answers. It returns the
// index of that one. On failure it returns the status for the host: refused if any
// target said so, else unreachable.
func (s *Server) dial(ctx context.Context, network string, targets []netip.AddrPort, req wire.FlowRequest) (net.Conn, int, wire.FlowStatus, error) {
	if len(targets) == 0 {
		return nil, 0, wire.FlowRefused, errNoTarget
	}
	d := attempts{s: s, network: network, targets: targets, status: wire.FlowUnreachable}
	for i, target := range targets {
		if s.opt.Own(req.Key.Protocol, target) {
			d.status = wire.FlowRefused
			d.errs = append(d.errs, fmt.Errorf("dial %s: %w", target, errOwn))
		} else {
			d.left = append(d.left, i)
		}
	}
	d.all(ctx)
	if d.conn == nil {
		if len(d.errs) == 0 { // ctx ended before the first attempt
			d.errs = append(d.errs, context.Cause(ctx))
		}
		return nil, 0, d.status, oneLine(d.errs)
	}
	if network == "tcp" {
		s.worked(req, targets[d.at])
	}
	return d.conn, d.at, wire.FlowOK, nil
}

// attempts are those at the targets of one flow.
type attempts struct {
	s       *Server
	network string
	targets []netip.AddrPort

	mu     sync.Mutex
	left   []int // indexes of the targets that were not tried
	conn   net.Conn
	at     int // index of what conn leads to
	status wire.FlowStatus
	errs   []error

	timer  *time.Timer // adds one who tries
	over   bool        // nobody is added any more
	others sync.WaitGroup
	cancel context.CancelFunc
}

// all returns when a target has answered or none is left. The caller tries alone
// until one is slow: what is slow is then waited for beside the others.
func (d *attempts) all(ctx context.Context) {
	if len(d.left) > 1 {
		ctx, d.cancel = context.WithCancel(ctx)
		defer d.cancel()
		d.mu.Lock()
		d.timer = time.AfterFunc(attemptDelay, func() { d.beside(ctx) })
		d.mu.Unlock()
	}
	d.some(ctx)
	if d.timer == nil {
		return
	}
	d.mu.Lock()
	d.over = true
	d.mu.Unlock()
	d.timer.Stop()
	d.others.Wait()
}

// beside tries targets while others are being tried.
func (d *attempts) beside(ctx context.Context) {
	d.mu.Lock()
	if d.over || len(d.left) == 0 {
		d.mu.Unlock()
		return
	}
	d.others.Add(1)
	d.timer.Reset(attemptDelay)
	d.mu.Unlock()
	defer d.others.Done()
	d.some(ctx)
}

// some tries one target after the other until one has answered or none is left.
func (d *attempts) some(ctx context.Context) {
	for ctx.Err() == nil {
		d.mu.Lock()
		if len(d.left) == 0 {
			d.mu.Unlock()
			return
		}
		i := d.left[0]
		d.left = d.left[1:]
		d.mu.Unlock()
		dctx, cancel := context.WithTimeout(ctx, d.s.opt.DialTimeout)
		conn, err := d.s.opt.Dial(dctx, d.network, d.targets[i])
		cancel()
		d.ended(i, conn, err)
	}
}

// ended takes in how an attempt ended.
func (d *attempts) ended(i int, conn net.Conn, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case d.conn != nil: // another was faster
		if err == nil {
			_ = conn.Close()
		}
	case err != nil:
		d.errs = append(d.errs, err)
		if errors.Is(err, syscall.ECONNREFUSED) {
			d.status = wire.FlowRefused
		}
	default:
		d.conn, d.at, d.left = conn, i, nil
		if d.cancel != nil {
			d.cancel()
		}
	}
}

// oneLine joins errors on one line, as a reason must be.
func oneLine(errs []error) error {
	if len(errs) == 1 {
		return errs[0]
	}
	err := errs[0]
	for _, e := range errs[1:] {
		err = fmt.Errorf("%w; %w", err, e)
	}
	return err
}
