// SPDX-License-Identifier: Apache-2.0

package netwatch

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Kind is what the routes of a namespace make of an address.
type Kind uint8

// The kinds of addresses.
const (
	Elsewhere Kind = iota // of another machine, or unreachable
	Own                   // of this machine
	Broadcast
)

// Classify asks the kernel's routes in the namespace of the calling thread what an
// address is. Link-local IPv6 addresses need an interface, so they are Elsewhere.
func Classify(addr netip.Addr) (Kind, error) {
	if addr == netip.AddrFrom4([4]byte{255, 255, 255, 255}) {
		return Broadcast, nil // also without a route
	}
	routes, err := netlink.RouteGet(addr.AsSlice())
	switch {
	case errors.Is(err, unix.ENETUNREACH), errors.Is(err, unix.EHOSTUNREACH):
		return Elsewhere, nil
	case err != nil:
		return Elsewhere, fmt.Errorf("route to %v: %w", addr, err)
	case len(routes) == 0:
		return Elsewhere, nil
	}
	switch routes[0].Type {
	case unix.RTN_LOCAL:
		return Own, nil
	case unix.RTN_BROADCAST:
		return Broadcast, nil
	}
	return Elsewhere, nil
}
