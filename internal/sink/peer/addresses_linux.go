// SPDX-License-Identifier: Apache-2.0

package peer

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// addressGroups are the rtnetlink groups that tell of addresses, and of links
// that come and go.
var addressGroups = []uint32{unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR, unix.RTNLGRP_LINK}

// WatchAddresses calls changed whenever addresses or links of this network
// namespace may have changed, until ctx ends. One call may stand for many
// changes, and the first is made once the kernel is listened to.
func WatchAddresses(ctx context.Context, changed func()) error {
	c, err := netlink.Dial(unix.NETLINK_ROUTE, nil)
	if err != nil {
		return fmt.Errorf("watch addresses: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { _ = c.SetReadDeadline(time.Unix(1, 0)) })
	defer func() {
		stop()
		_ = c.Close()
	}()
	for _, g := range addressGroups {
		if err := c.JoinGroup(g); err != nil {
			return fmt.Errorf("watch addresses: group %d: %w", g, err)
		}
	}
	changed()
	for {
		_, err := c.Receive()
		if ctx.Err() != nil {
			return ctx.Err()
		}
		// An overflow says that something was missed: look.
		if err != nil && !errors.Is(err, unix.ENOBUFS) {
			return fmt.Errorf("watch addresses: %w", err)
		}
		changed()
	}
}

// InterfaceAddresses returns the addresses of an interface with their prefix
// lengths, in the kernel's order. An interface that is not there is an error.
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
