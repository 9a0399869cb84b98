// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package relay imitates WSL's localhost relay in NAT mode: it dumps the TCP
// sockets that listen in the guest once in a while, keeps those at 0.0.0.0,
// 127.0.0.1, :: and ::1, and shows each outside at 127.0.0.1 or ::1 only. A
// connection outside becomes a local one inside.
package relay

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/link/forward"
	"github.com/fairlead/fairlead/internal/testkit/netns"
)

const tcpListen = 10 // TCP_LISTEN

// Relay shows a guest's listeners in another namespace.
type Relay struct {
	// Guest is where sockets listen, Outside where they are shown.
	Guest, Outside *netns.Space
	// Interval is the time between two dumps; WSL's is 1 s.
	Interval time.Duration

	mu    sync.Mutex
	shown map[netip.AddrPort]net.Listener // nil: the port was taken outside, which is not tried again
}

// Run relays until ctx ends.
func (r *Relay) Run(ctx context.Context) error {
	r.mu.Lock()
	r.shown = make(map[netip.AddrPort]net.Listener)
	r.mu.Unlock()
	var wg sync.WaitGroup
	defer wg.Wait()
	defer r.sync(ctx, nil, &wg)
	tick := time.NewTicker(r.Interval)
	defer tick.Stop()
	for {
		want, err := r.scan()
		if err != nil {
			return err
		}
		r.sync(ctx, want, &wg)
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// Shows reports whether addr is open outside.
func (r *Relay) Shows(addr netip.AddrPort) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.shown[addr] != nil
}

// scan returns the addresses to show.
func (r *Relay) scan() (map[netip.AddrPort]struct{}, error) {
	want := make(map[netip.AddrPort]struct{})
	err := r.Guest.Do(func() error {
		for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
			var sockets []*netlink.Socket
			var err error
			for range 10 { // a dump may be interrupted
				if sockets, err = netlink.SocketDiagTCP(family); !errors.Is(err, netlink.ErrDumpInterrupted) {
					break
				}
			}
			if err != nil {
				return fmt.Errorf("dump sockets: %w", err)
			}
			for _, s := range sockets {
				a, ok := netip.AddrFromSlice(s.ID.Source)
				if s.State != tcpListen || !ok {
					continue
				}
				if family == unix.AF_INET {
					a = a.Unmap()
				}
				switch a {
				case netip.IPv4Unspecified(), netip.AddrFrom4([4]byte{127, 0, 0, 1}):
					want[netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), s.ID.SourcePort)] = struct{}{}
				case netip.IPv6Unspecified(), netip.IPv6Loopback(): // :: gives ::1 alone, though it may take IPv4
					want[netip.AddrPortFrom(netip.IPv6Loopback(), s.ID.SourcePort)] = struct{}{}
				}
			}
		}
		return nil
	})
	return want, err
}

func (r *Relay) sync(ctx context.Context, want map[netip.AddrPort]struct{}, wg *sync.WaitGroup) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for addr, l := range r.shown {
		if _, ok := want[addr]; !ok {
			if l != nil {
				_ = l.Close()
			}
			delete(r.shown, addr)
		}
	}
	for addr := range want {
		if _, ok := r.shown[addr]; ok {
			continue
		}
		l, err := r.Outside.Listen("tcp", addr.String())
		if err != nil {
			l = nil // busy: neither retried nor reported
		} else {
			wg.Go(func() { r.accept(ctx, l, addr, wg) })
		}
		r.shown[addr] = l
	}
}

func (r *Relay) accept(ctx context.Context, l net.Listener, addr netip.AddrPort, wg *sync.WaitGroup) {
	for {
		outer, err := l.Accept()
		if err != nil {
			return
		}
		wg.Go(func() {
			inner, err := r.Guest.Dial("tcp", addr.String())
			if err != nil {
				forward.Reset(outer)
				return
			}
			_ = forward.Splice(ctx, outer, inner, nil)
		})
	}
}
