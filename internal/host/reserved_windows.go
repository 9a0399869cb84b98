// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"net/netip"

	"github.com/fairlead/fairlead/internal/port"
)

// ReservedPorts returns the ranges of TCP ports that the operating system reserves.
func ReservedPorts(ctx context.Context) ([]PortRange, error) {
	return netshReserved(ctx, Socket{Protocol: port.TCP, Addr: netip.AddrPortFrom(netip.IPv4Unspecified(), 0)})
}
