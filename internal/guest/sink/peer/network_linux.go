// SPDX-License-Identifier: Apache-2.0

package peer

import (
	"context"
	"fmt"
	"log/slog"
	"net"

	"github.com/fairlead/fairlead/internal/guest/netwatch"
)

// WatchNetwork calls changed whenever links or addresses of the process's network
// namespace may have changed, until ctx ends.
func WatchNetwork(ctx context.Context, log *slog.Logger, changed func()) {
	netwatch.Follow(ctx, netwatch.Options{Log: log, Parts: netwatch.Links | netwatch.Addresses}, changed)
}

// InterfaceAddresses returns the addresses of an interface with their prefix
// lengths, in the kernel's order: of a family, peers connect to the first. An
// interface that does not exist is an error.
func InterfaceAddresses(name string) ([]*net.IPNet, error) {
	i, err := net.InterfaceByName(name)
	if err != nil {
		return nil, fmt.Errorf("interface %s: %w", name, err)
	}
	all, err := i.Addrs()
	if err != nil {
		return nil, fmt.Errorf("addresses of interface %s: %w", name, err)
	}
	var nets []*net.IPNet
	for _, a := range all {
		if n, ok := a.(*net.IPNet); ok {
			nets = append(nets, n)
		}
	}
	return nets, nil
}
