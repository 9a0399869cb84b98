// SPDX-License-Identifier: Apache-2.0

package forward

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"sync"
	"syscall"

	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/wire"
)

// errIdle is the orderly end of a UDP flow.
var errIdle = errors.New("idle")

// udpFlow is one client's datagrams to one server. Which of several targets
// answers is found by trying: a target that refuses before anything was ever
// answered hands the flow, and the last datagram, to the next.
type udpFlow struct {
	s       *Server
	stream  link.Stream
	req     wire.FlowRequest
	targets []netip.AddrPort
	idle    *Idle

	mu       sync.Mutex
	conn     net.Conn
	at       int  // index of conn's target
	answered bool // by conn
	tried    int  // targets that refused the last datagram
	last     []byte
	closed   bool
}

func (s *Server) serveUDP(ctx context.Context, stream link.Stream, targets []netip.AddrPort, req wire.FlowRequest) error {
	conn, at, status, err := s.dial(ctx, "udp", targets, req)
	if err != nil {
		return s.refuse(stream, status, err)
	}
	if err := s.accept(stream); err != nil {
		_ = conn.Close()
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	f := &udpFlow{s: s, stream: stream, req: req, targets: targets, conn: conn, at: at}
	f.idle = NewIdle(s.opt.UDPIdle, func() { cancel(errIdle) })
	defer f.idle.Stop()

	stopped := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(stopped)
		f.close(context.Cause(ctx))
	})
	var wg sync.WaitGroup
	wg.Go(func() { cancel(f.toHost(ctx)) })
	cancel(f.toGuest(ctx))
	wg.Wait()
	if !stop() {
		<-stopped
	}
	if err := context.Cause(ctx); !inOrder(err) {
		return err
	}
	_ = stream.Close()
	return nil
}

// inOrder reports whether a flow ended because it was idle or the host ended it.
func inOrder(cause error) bool { return errors.Is(cause, errIdle) || errors.Is(cause, io.EOF) }

// close makes both directions return.
func (f *udpFlow) close(cause error) {
	if inOrder(cause) {
		_ = f.stream.SetDeadline(past)
	} else {
		_ = f.stream.Reset()
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.closed = true
	_ = f.conn.Close()
}

// toGuest sends what the client sends.
func (f *udpFlow) toGuest(ctx context.Context) error {
	// The small reader takes header and most payloads at once; what is larger it
	// passes through.
	r := bufio.NewReaderSize(f.stream, smallBuffer)
	for {
		if _, err := r.Peek(1); err != nil { // the frame is borrowed only when needed
			return err
		}
		frame := BorrowFrame()
		n, err := wire.ReadDatagram(r, frame[:])
		if err == nil {
			f.idle.Touch()
			f.s.meter.AToB.Add(uint64(n))
			f.send(ctx, frame[:n])
		}
		frame.Return()
		if err != nil {
			return err
		}
	}
}

// send gives one datagram to the guest. What fails is lost, as datagrams are.
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
		// That was the answer to an earlier datagram; this one was not sent.
		if conn := f.conn; !f.next(ctx, conn) {
			_, _ = conn.Write(b)
		}
	}
}

// refused notes that conn's target refused a datagram, and reports whether
// another is tried.
func (f *udpFlow) refused(ctx context.Context, conn net.Conn) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.next(ctx, conn)
}

// next goes from conn to the next target, once round for each datagram, and
// sends the last datagram to it. It reports whether conn is no longer in use.
// f.mu is held.
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
		if f.s.opt.Own(f.req.Key.Protocol, target) {
			continue
		}
		dctx, cancel := context.WithTimeout(ctx, f.s.opt.DialTimeout)
		fresh, err := f.s.opt.Dial(dctx, "udp", target)
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

// toHost sends what the server answers.
func (f *udpFlow) toHost(ctx context.Context) error {
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
		case errors.Is(err, errStream):
			return err
		case errors.Is(err, syscall.ECONNREFUSED):
			f.refused(ctx, conn)
		case passing(err):
		default:
			if c, ok := f.current(); ok && c == conn {
				return err
			}
		}
	}
}

// passing reports whether a socket goes on after err, which came by ICMP.
func passing(err error) bool {
	return errors.Is(err, syscall.EHOSTUNREACH) || errors.Is(err, syscall.ENETUNREACH) || errors.Is(err, syscall.EMSGSIZE)
}

// errStream marks an error of the stream among those of the socket.
var errStream = errors.New("stream")

// receive takes one datagram from conn to the stream.
func (f *udpFlow) receive(conn net.Conn, r *Receiver) error {
	frame, n, _, err := r.Receive()
	if err != nil {
		return err
	}
	defer frame.Return()
	f.idle.Touch()
	f.heard(conn)
	if err := WriteFrame(f.stream, frame[:FrameHead+n]); err != nil {
		return errors.Join(errStream, err)
	}
	f.s.meter.BToA.Add(uint64(n))
	return nil
}

// heard notes that conn's target answers.
func (f *udpFlow) heard(conn net.Conn) {
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
