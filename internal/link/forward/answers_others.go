// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package forward

import (
	"net"
	"net/netip"
)

// receiveAt returns nil: the kernel chooses the source of answers.
func receiveAt(*net.UDPConn) []byte { return nil }

func arrivedAt([]byte) netip.Addr { return netip.Addr{} }

func sourceControl(netip.Addr) []byte { return nil }
