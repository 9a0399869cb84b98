// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/fairlead/fairlead/internal/port"
)

// Published is one published port as an engine reports it, unchecked.
type Published struct {
	Protocol      string // "tcp" if empty
	HostIP        string // "0.0.0.0" if empty
	HostPort      int64  // in the guest; 1 to 65535
	ContainerPort int64
}

// Container is whose ports they are.
type Container struct {
	ID        string
	Owner     port.Owner
	Addresses []netip.Addr // that the guest can dial, best first
	Paused    bool
}

// Declare turns published ports into bindings, sorted by origin. What cannot be
// published is named in warnings, and harms no other port. A port is dialled
// where the guest itself would reach it, and then at the container.
func Declare(c Container, ports []Published) (bindings []port.Binding, warnings []string) {
	for _, p := range ports {
		b, err := declare(c, p)
		if err != nil {
			warnings = append(warnings, fmt.Sprintf("%s %q: %v", c.Owner.Kind, c.Owner.Name, err))
			continue
		}
		bindings = append(bindings, b)
	}
	slices.SortFunc(bindings, func(a, b port.Binding) int { return cmp.Compare(a.Origin.ID, b.Origin.ID) })
	bindings = slices.CompactFunc(bindings, func(a, b port.Binding) bool { return a.Origin.ID == b.Origin.ID })
	slices.Sort(warnings)
	return bindings, slices.Compact(warnings)
}

func declare(c Container, p Published) (port.Binding, error) {
	name := cmp.Or(strings.ToLower(p.Protocol), "tcp")
	text := fmt.Sprintf("port %s:%d->%d/%s", p.HostIP, p.HostPort, p.ContainerPort, name)
	if name == "sctp" {
		return port.Binding{}, fmt.Errorf("%s: sctp is not supported, only tcp and udp are published", text)
	}
	proto, err := port.ParseProtocol(name)
	if err != nil {
		return port.Binding{}, fmt.Errorf("%s: %w", text, err)
	}
	for _, n := range []int64{p.HostPort, p.ContainerPort} {
		if n < 1 || n > 65535 {
			return port.Binding{}, fmt.Errorf("%s: %d is no port: want 1 to 65535", text, n)
		}
	}
	host := netip.IPv4Unspecified()
	if p.HostIP != "" {
		if host, err = netip.ParseAddr(p.HostIP); err != nil {
			return port.Binding{}, fmt.Errorf("%s: %q is no address", text, p.HostIP)
		}
		host = host.Unmap()
	}
	b := port.Binding{
		Key:    port.Key{Protocol: proto, Address: host, Port: uint16(p.HostPort)},
		Owner:  c.Owner,
		Paused: c.Paused,
		Origin: port.Origin{ID: c.ID + "/" + proto.String() + "/" + netip.AddrPortFrom(host, uint16(p.HostPort)).String()},
	}
	detail := c.Owner.Name + " container port " + strconv.FormatInt(p.ContainerPort, 10) + "/" + proto.String()
	if c.Paused {
		detail += " (paused)"
	}
	b.Detail = port.NewDetail(detail)
	own := host
	if port.IsWildcard(host) {
		own = port.Loopback(host)
	}
	b.Dial = append(b.Dial, netip.AddrPortFrom(own, b.Port))
	for _, sameFamily := range []bool{true, false} {
		for _, a := range c.Addresses {
			if (a.Is4() == host.Is4()) == sameFamily {
				b.Dial = append(b.Dial, netip.AddrPortFrom(a, uint16(p.ContainerPort)))
			}
		}
	}
	return b, nil
}
