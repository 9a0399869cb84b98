// SPDX-License-Identifier: Apache-2.0

package forward

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"sync"
	"syscall"

	"github.com/fairlead/fairlead/internal/link/trace"
	"github.com/fairlead/fairlead/internal/port"
)

// errIdle is the orderly end of a UDP flow.
var errIdle = errors.New("idle")

// udpFlow moves one client's datagrams to and from one server. Which of several
// targets answers is found by trying: a target that refuses before any answer
// hands the flow, and the last datagram, to the next.
type udpFlow struct {
	s       *Server
	client  Datagrams
	req     Request
	targets []netip.AddrPort
	idle    *Idle
	flow    *trace.Flow // nil if it is not traced

	mu       sync.Mutex
	conn     net.Conn
	at       int  // index of conn's target
	answered bool // by conn
	tried    int  // targets that refused the last datagram
	last     []byte
	closed   bool
}

func (s *Server) serveUDP(ctx context.Context, client Datagrams, req Request) error {
	targets := s.targets(req)
	conn, at, err := s.dial(ctx, "udp", targets, req)
	if err != nil {
		return s.refuse(client, req, err)
	}
	if err := s.accept(client, req); err != nil {
		_ = conn.Close()
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	f := &udpFlow{s: s, client: client, req: req, targets: targets, conn: conn, at: at, flow: trace.From(ctx)}
	f.idle = NewIdle(s.opt.UDPIdle, func() { cancel(errIdle) })
	defer f.idle.Stop()

	stopped := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(stopped)
		f.close(context.Cause(ctx))
	})
	var wg sync.WaitGroup
	wg.Go(func() { cancel(f.toClient(ctx)) })
	cancel(f.toServer(ctx))
	wg.Wait()
	if !stop() {
		<-stopped
	}
	if err := context.Cause(ctx); !inOrder(err) {
		return err
	}
	_ = client.Close()
	return nil
}

// inOrder reports whether a flow ended because it was idle or the client ended it.
func inOrder(cause error) bool { return errors.Is(cause, errIdle) || errors.Is(cause, io.EOF) }

// close makes both directions return.
func (f *udpFlow) close(cause error) {
	if inOrder(cause) {
		f.client.Stop()
	} else {
		_ = f.client.Reset()
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.closed = true
	_ = f.conn.Close()
}

// toServer sends what the client sends.
func (f *udpFlow) toServer(ctx context.Context) error {
	for {
		if err := f.client.Wait(); err != nil { // the frame is borrowed only when needed
			return err
		}
		frame := BorrowFrame()
		n, err := f.client.Receive(frame[:])
		if err == nil {
			f.idle.Touch()
			f.s.meter.AToB.Add(uint64(n))
			f.flow.Moved(trace.ToGuest, n, frame[:n])
			f.send(ctx, frame[:n])
		}
		frame.Return()
		if err != nil {
			return err
		}
	}
}

// send sends one datagram to the server. A failure loses it, as UDP may.
func (f *udpFlow) send(ctx context.Context, b []byte) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return
	}
	if !f.answered && len(f.targets) > 1 {
		f.last, f.tried = append(f.last[:0], b...), 0
	}
	if _, err := f.conn.Write(b); errors.Is(err, syscall.ECONNREFUSED) {
		// The refusal of an earlier datagram; this one was not sent.
		if conn := f.conn; !f.next(ctx, conn) {
			_, _ = conn.Write(b)
		}
	}
}

// refused records that conn's target refused a datagram, and reports whether
// another target is tried.
func (f *udpFlow) refused(ctx context.Context, conn net.Conn) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.next(ctx, conn)
}

// next goes from conn to the next target, trying each target at most once for a
// datagram, and sends the last datagram to it. It reports whether conn is no
// longer in use. f.mu is held.
func (f *udpFlow) next(ctx context.Context, conn net.Conn) bool {
	if conn != f.conn {
		return true
	}
	if f.closed || f.answered || len(f.targets) < 2 {
		return false
	}
	if f.tried++; f.tried >= len(f.targets) {
		return false
	}
	for i := 1; i < len(f.targets); i++ {
		at := (f.at + i) % len(f.targets)
		target := f.targets[at]
		if f.s.opt.Own(port.UDP, target) {
			continue
		}
		dctx, cancel := context.WithTimeout(ctx, f.s.opt.DialTimeout)
		fresh, err := f.s.connect(dctx, "udp", target)
		cancel()
		if err != nil {
			continue
		}
		_ = f.conn.Close()
		f.conn, f.at = fresh, at
		_, _ = fresh.Write(f.last)
		return true
	}
	return false
}

// current returns the connection in use, false when the flow is over.
func (f *udpFlow) current() (net.Conn, bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.conn, !f.closed
}

// toClient sends what the server answers.
func (f *udpFlow) toClient(ctx context.Context) error {
	var conn net.Conn
	var r *Receiver
	for {
		c, ok := f.current()
		if !ok {
			return net.ErrClosed
		}
		if c != conn {
			conn, r = c, NewReceiver(c)
		}
		err := f.receive(conn, r)
		switch {
		case err == nil:
		case errors.Is(err, errClient):
			return err
		case errors.Is(err, syscall.ECONNREFUSED):
			f.refused(ctx, conn)
		case temporary(err):
		default:
			if c, ok := f.current(); ok && c == conn {
				return err
			}
		}
	}
}

// temporary reports whether a socket remains usable after err, which came by ICMP.
func temporary(err error) bool {
	return errors.Is(err, syscall.EHOSTUNREACH) || errors.Is(err, syscall.ENETUNREACH) || errors.Is(err, syscall.EMSGSIZE)
}

// errClient marks an error of the client's side among those of the socket.
var errClient = errors.New("client")

// receive moves one datagram from conn to the client.
func (f *udpFlow) receive(conn net.Conn, r *Receiver) error {
	frame, n, _, err := r.Receive()
	if err != nil {
		return err
	}
	defer frame.Return()
	f.idle.Touch()
	f.received(conn)
	if err := f.client.Send(frame[:FrameHead+n]); err != nil {
		return errors.Join(errClient, err)
	}
	f.s.meter.BToA.Add(uint64(n))
	f.flow.Moved(trace.ToHost, n, frame[FrameHead:FrameHead+n])
	return nil
}

// received records that conn's target answers.
func (f *udpFlow) received(conn net.Conn) {
	f.mu.Lock()
	if f.answered || conn != f.conn {
		f.mu.Unlock()
		return
	}
	f.answered, f.last = true, nil
	target := f.targets[f.at]
	f.mu.Unlock()
	f.s.worked(f.req, target)
}
