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

	"github.com/fairlead/fairlead/internal/link/own"
	"github.com/fairlead/fairlead/internal/port"
)

var (
	errNoTarget = errors.New("nothing is known to serve it")
	errOwn      = errors.New("served by fairlead itself")
)

// attemptDelay is how long an attempt may be pending until the next target is tried
// as well ("Connection Attempt Delay", RFC 8305, section 5). A Service's own address
// does not answer until kube-proxy has its rules, while its node port may.
const attemptDelay = 250 * time.Millisecond

// dial tries the targets in order, and takes the first that answers. It returns
// the index of that one. An error is a *DialError.
func (s *Server) dial(ctx context.Context, network string, targets []netip.AddrPort, req Request) (net.Conn, int, error) {
	if len(targets) == 0 {
		return nil, 0, &DialError{Refused: true, Err: errNoTarget}
	}
	d := attempts{s: s, network: network, targets: targets}
	protocol := port.TCP
	if network == "udp" {
		protocol = port.UDP
	}
	for i, target := range targets {
		if s.opt.Own(protocol, target) {
			d.refused = true
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
		return nil, 0, &DialError{d.refused, oneLine(d.errs)}
	}
	if network == "tcp" {
		s.worked(req, targets[d.at])
	}
	return d.conn, d.at, nil
}

// attempts are those at the targets of one flow.
type attempts struct {
	s       *Server
	network string
	targets []netip.AddrPort

	mu      sync.Mutex
	left    []int // indexes of the targets that were not tried
	conn    net.Conn
	at      int  // index of conn's target
	refused bool // a target refused, or is served by ourselves
	errs    []error

	timer  *time.Timer // starts a further attempt
	over   bool        // no further attempt may start
	others sync.WaitGroup
	cancel context.CancelFunc
}

// all returns when a target has answered or none is left. It tries one at a time
// until one is slow; then the next ones are tried while that is still pending.
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

// beside tries targets while earlier attempts are pending.
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

// some tries one target after the other until one answers or none is left.
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
		conn, err := d.s.connect(dctx, d.network, d.targets[i])
		cancel()
		d.ended(i, conn, err)
	}
}

// connect is ServerOptions.Dial, which leaves the last descriptors for other uses.
func (s *Server) connect(ctx context.Context, network string, target netip.AddrPort) (net.Conn, error) {
	conn, err := s.opt.Dial(ctx, network, target)
	if err != nil {
		return nil, err
	}
	if !own.Scarce(conn, own.ForFlow) {
		return conn, nil
	}
	_ = conn.Close()
	s.scarce.Do(func() {
		s.opt.Logger.Warn("refusing flows: too few file descriptors left", "limit", own.Descriptors())
	})
	return nil, fmt.Errorf("dial %s: %w", target, own.ErrDescriptors)
}

// ended records the result of an attempt.
func (d *attempts) ended(i int, conn net.Conn, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case d.conn != nil: // another was faster
		if err == nil {
			CloseOrderly(conn) // it carried nothing
		}
	case err != nil:
		d.errs = append(d.errs, err)
		if errors.Is(err, syscall.ECONNREFUSED) {
			d.refused = true
		}
	default:
		Abortive(conn)
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
