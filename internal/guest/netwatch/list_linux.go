// SPDX-License-Identifier: Apache-2.0

package netwatch

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/guest/kernel"
)

const (
	listAttempts = 8                // of a dump that the kernel says a change interrupted
	listTimeout  = 10 * time.Second // for one answer of the kernel
)

// List reads what there is in the network namespace at path; empty is the
// process's own.
func List(path string, parts Part) (Snapshot, error) {
	var s Snapshot
	err := inNetns(path, func() (err error) {
		s, err = list(parts)
		return err
	})
	return s, err
}

// inNetns runs f on a thread that is in the namespace at path. Sockets that f
// opens stay in it.
func inNetns(path string, f func() error) error {
	if path == "" {
		return f()
	}
	return kernel.OnThread(func() error {
		if err := kernel.EnterNamespace(path); err != nil {
			return err
		}
		return f()
	})
}

// list reads the namespace of the calling thread.
func list(parts Part) (s Snapshot, err error) {
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return s, fmt.Errorf("netlink: %w", err)
	}
	defer h.Close()
	// Without strict checking the kernel sends more than was asked for, no less.
	_ = h.SetStrictCheck(true)
	if err := h.SetSocketTimeout(listTimeout); err != nil {
		return s, fmt.Errorf("netlink: %w", err)
	}
	for range listAttempts {
		s = Snapshot{}
		if err = s.read(h, parts); !errors.Is(err, netlink.ErrDumpInterrupted) {
			break
		}
	}
	s.sort()
	return s, err
}

func (s *Snapshot) read(h *netlink.Handle, parts Part) error {
	if parts&Links != 0 {
		links, err := h.LinkList()
		if err != nil {
			return fmt.Errorf("list links: %w", err)
		}
		for _, l := range links {
			s.Links = append(s.Links, linkOf(l))
		}
	}
	if parts&Addresses != 0 {
		addrs, err := h.AddrList(nil, netlink.FAMILY_ALL)
		if err != nil {
			return fmt.Errorf("list addresses: %w", err)
		}
		for _, a := range addrs {
			if p, ok := prefixOf(a.IPNet); ok {
				s.Addresses = append(s.Addresses, Address{a.LinkIndex, p})
			}
		}
	}
	if parts&Routes != 0 {
		if err := s.readRoutes(h); err != nil {
			return fmt.Errorf("list routes: %w", err)
		}
	}
	return nil
}

func (s *Snapshot) readRoutes(h *netlink.Handle) error {
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		every := netlink.Route{Table: unix.RT_TABLE_UNSPEC}
		err := h.RouteListFilteredIter(family, &every, netlink.RT_FILTER_TABLE, func(r netlink.Route) bool {
			if into := s.routesLike(&r); into != nil {
				*into = append(*into, routesOf(&r)...)
			}
			return true
		})
		// A family that is disabled.
		if err != nil && !errors.Is(err, unix.EAFNOSUPPORT) && !errors.Is(err, unix.ENOENT) {
			return err
		}
	}
	return nil
}

// routesLike returns the list that a route belongs to, nil if none.
func (s *Snapshot) routesLike(r *netlink.Route) *[]Route {
	switch {
	case r.Table == unix.RT_TABLE_LOCAL && r.Type == unix.RTN_LOCAL:
		return &s.Local
	case r.Table == unix.RT_TABLE_LOCAL || r.Type != unix.RTN_UNICAST || !isDefault(r):
		return nil
	case r.Table == unix.RT_TABLE_MAIN:
		return &s.Defaults
	}
	return &s.Others
}

// isDefault reports whether a route is to all addresses, or to half of them, as the two are
// that a VPN puts before a default route.
func isDefault(r *netlink.Route) bool {
	if r.Dst == nil {
		return true
	}
	ones, _ := r.Dst.Mask.Size()
	return ones <= 1
}

// routesOf returns one route for each link that a route leads to.
func routesOf(r *netlink.Route) []Route {
	dst, ok := prefixOf(r.Dst)
	if !ok {
		return nil
	}
	if len(r.MultiPath) == 0 {
		return []Route{{dst, r.LinkIndex}}
	}
	out := make([]Route, 0, len(r.MultiPath))
	for _, hop := range r.MultiPath {
		out = append(out, Route{dst, hop.LinkIndex})
	}
	return out
}

func linkOf(l netlink.Link) Link {
	a := l.Attrs()
	return Link{Index: a.Index, Name: a.Name, Flags: a.Flags, Bridge: l.Type() == "bridge"}
}

func prefixOf(n *net.IPNet) (netip.Prefix, bool) {
	if n == nil {
		return netip.Prefix{}, false
	}
	a, ok := netip.AddrFromSlice(n.IP)
	ones, bits := n.Mask.Size()
	if bits == 32 { // net.IPv4zero has 16 bytes
		a = a.Unmap()
	}
	p := netip.PrefixFrom(a, ones)
	return p, ok && p.IsValid()
}
