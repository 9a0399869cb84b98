// SPDX-License-Identifier: Apache-2.0

// Package own records the sockets that fairlead itself opened, so that it neither
// publishes nor dials them. A socket is recorded by its kernel cookie before it is
// bound, and so before an observer can see it.
package own

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/fairlead/fairlead/internal/port"
)

// Sockets is the set of our own sockets. The zero value is empty and ready; it
// is safe for concurrent use and must not be copied.
type Sockets struct {
	mu      sync.RWMutex
	cookies map[uint64]struct{}
	closed  []uint64         // those of cookies whose sockets are closed: a ring
	oldest  int              // in closed, once that is full
	addrs   map[endpoint]int // how many of our sockets hold it
}

// maxClosed bounds the cookies of closed sockets that are kept.
const maxClosed = 4096

type endpoint struct {
	protocol port.Protocol
	addr     netip.AddrPort
}

// Has reports whether cookie (SO_COOKIE, sock_diag's idiag_cookie) is of a socket
// of ours. One that is closed, or could not be bound, is still ours: its events are read
// later. The kernel never uses a cookie again. Where it has no cookies Has is always false.
func (s *Sockets) Has(cookie uint64) bool {
	s.mu.RLock()
	defer s.mu.RUnlock()
	_, ok := s.cookies[cookie]
	return ok
}

// Cookies returns the cookies for which Has is true, in any order.
func (s *Sockets) Cookies() []uint64 {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return slices.Collect(maps.Keys(s.cookies))
}

// Adopt makes the sockets of another fairlead ours, as far as Has goes: they are never published.
func (s *Sockets) Adopt(cookies []uint64) {
	for _, c := range cookies {
		s.add(c)
	}
}

// Serves reports whether a listener of ours, on addr or on the wildcard of its
// family, receives what is sent to addr. To dial it would connect us to ourselves.
func (s *Sockets) Serves(protocol port.Protocol, addr netip.AddrPort) bool {
	ip := addr.Addr().Unmap()
	s.mu.RLock()
	defer s.mu.RUnlock()
	if s.addrs[endpoint{protocol, netip.AddrPortFrom(ip, addr.Port())}] > 0 {
		return true
	}
	wildcard := netip.IPv6Unspecified()
	if ip.Is4() {
		wildcard = netip.IPv4Unspecified()
	}
	return s.addrs[endpoint{protocol, netip.AddrPortFrom(wildcard, addr.Port())}] > 0
}

// ListenConfig returns a configuration whose sockets are in the set before they
// are bound. They are never removed, so it is for sockets that live
// as long as the process; those of Listen and ListenPacket are removed some time after
// they are closed.
//
// MPTCP is off: an MPTCP socket listens through a subflow that has another
// cookie (mptcp_listen in net/mptcp/protocol.c).
func (s *Sockets) ListenConfig() net.ListenConfig {
	return s.listenConfig(nil, nil)
}

// listenConfig appends the cookies of its sockets to seen, if given; it is then for
// one call only. setUp, if given, is called for each before it is bound.
func (s *Sockets) listenConfig(seen *[]uint64, setUp func(syscall.RawConn) error) net.ListenConfig {
	lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		if setUp != nil {
			if err := setUp(c); err != nil {
				return err
			}
		}
		cookie, err := cookieOf(c)
		switch {
		case errors.Is(err, errors.ErrUnsupported):
			return nil // sockets are not observed here either
		case err != nil:
			return fmt.Errorf("read socket cookie: %w", err)
		}
		s.add(cookie)
		if seen != nil {
			*seen = append(*seen, cookie)
		}
		return nil
	}}
	lc.SetMultipathTCP(false)
	return lc
}

// Listen is net.Listen ("tcp", "tcp4", "tcp6", "unix") with a socket of ours.
// Connections that it accepts are the net package's own types.
func (s *Sockets) Listen(ctx context.Context, network, address string) (net.Listener, error) {
	ln, err := s.listen(ctx, network, address, nil)
	if err != nil {
		return nil, err
	}
	return ln, nil
}

func (s *Sockets) listen(ctx context.Context, network, address string, setUp func(syscall.RawConn) error) (*listener, error) {
	var cookies []uint64
	lc := s.listenConfig(&cookies, setUp)
	ln, err := lc.Listen(ctx, network, address)
	if err != nil {
		s.forget(cookies, nil)
		return nil, err
	}
	if Scarce(ln, ForFlow) {
		err := fmt.Errorf("listen %s %s: %w", network, address, ErrDescriptors)
		err = errors.Join(err, ln.Close())
		s.forget(cookies, nil)
		return nil, err
	}
	eps := endpoints(port.TCP, network, ln.Addr())
	s.hold(eps)
	return &listener{Listener: ln, release: s.releaser(cookies, eps)}, nil
}

// ListenPacket is net.ListenPacket ("udp", "udp4", "udp6") with a socket of ours.
// The caller owns the connection.
func (s *Sockets) ListenPacket(ctx context.Context, network, address string) (*UDPConn, error) {
	var cookies []uint64
	lc := s.listenConfig(&cookies, nil)
	pc, err := lc.ListenPacket(ctx, network, address)
	if err != nil {
		s.forget(cookies, nil)
		return nil, err
	}
	udp, ok := pc.(*net.UDPConn)
	if !ok {
		err = fmt.Errorf("listen %s %s: not a UDP socket", network, address)
	} else if Scarce(udp, ForFlow) {
		err = fmt.Errorf("listen %s %s: %w", network, address, ErrDescriptors)
	}
	if err != nil {
		err = errors.Join(err, pc.Close())
		s.forget(cookies, nil)
		return nil, err
	}
	eps := endpoints(port.UDP, network, udp.LocalAddr())
	s.hold(eps)
	return &UDPConn{UDPConn: udp, release: s.releaser(cookies, eps)}, nil
}

func (s *Sockets) add(cookie uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cookies == nil {
		s.cookies = make(map[uint64]struct{})
	}
	s.cookies[cookie] = struct{}{}
}

func (s *Sockets) hold(eps []endpoint) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.addrs == nil {
		s.addrs = make(map[endpoint]int)
	}
	for _, ep := range eps {
		s.addrs[ep]++
	}
}

// forget notes that sockets are closed.
func (s *Sockets) forget(cookies []uint64, eps []endpoint) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range cookies {
		if len(s.closed) < maxClosed {
			s.closed = append(s.closed, c)
			continue
		}
		delete(s.cookies, s.closed[s.oldest])
		s.closed[s.oldest] = c
		s.oldest = (s.oldest + 1) % maxClosed
	}
	for _, ep := range eps {
		if s.addrs[ep]--; s.addrs[ep] <= 0 {
			delete(s.addrs, ep)
		}
	}
}

func (s *Sockets) releaser(cookies []uint64, eps []endpoint) func() {
	return sync.OnceFunc(func() { s.forget(cookies, eps) })
}

// endpoints returns what a socket at addr serves: a :: socket of an unqualified
// network serves IPv4 too.
func endpoints(protocol port.Protocol, network string, addr net.Addr) []endpoint {
	var ap netip.AddrPort
	switch a := addr.(type) {
	case *net.TCPAddr:
		ap = a.AddrPort()
	case *net.UDPAddr:
		ap = a.AddrPort()
	default:
		return nil
	}
	ip := ap.Addr().Unmap()
	eps := []endpoint{{protocol, netip.AddrPortFrom(ip, ap.Port())}}
	if ip == netip.IPv6Unspecified() && !strings.HasSuffix(network, "6") {
		eps = append(eps, endpoint{protocol, netip.AddrPortFrom(netip.IPv4Unspecified(), ap.Port())})
	}
	return eps
}

// listener is a listener of ours.
type listener struct {
	net.Listener
	release func()
}

func (l *listener) Close() error {
	err := l.Listener.Close()
	l.release()
	return err
}

// SyscallConn implements syscall.Conn.
func (l *listener) SyscallConn() (syscall.RawConn, error) {
	c, ok := l.Listener.(syscall.Conn)
	if !ok {
		return nil, errors.ErrUnsupported
	}
	return c.SyscallConn()
}

// SetDeadline bounds Accept.
func (l *listener) SetDeadline(t time.Time) error {
	d, ok := l.Listener.(interface{ SetDeadline(t time.Time) error })
	if !ok {
		return errors.ErrUnsupported
	}
	return d.SetDeadline(t)
}

// UDPConn is a UDP socket of ours.
type UDPConn struct {
	*net.UDPConn
	release func()
}

// Close closes the socket.
func (c *UDPConn) Close() error {
	err := c.UDPConn.Close()
	c.release()
	return err
}
