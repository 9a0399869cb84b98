// SPDX-License-Identifier: Apache-2.0

//go:build !unix

package forward

import (
	"net"
	"net/netip"
	"syscall"
)

func rawConn(net.Conn) syscall.RawConn { return nil }

func (r *Receiver) receive(uintptr) bool { return true }

func named(a netip.AddrPort) netip.AddrPort { return a }
