// SPDX-License-Identifier: Apache-2.0

//go:build linux

package kernel

import (
	"bytes"
	"fmt"
	"net/netip"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/guest/kernel/bpf"
	"github.com/fairlead/fairlead/internal/port"
)

const eventSize = int(unsafe.Sizeof(bpf.SockEvent{}))

// DecodeEvent decodes a struct event of the ring buffer, which it does not keep.
func DecodeEvent(sample []byte, e *bpf.SockEvent) error {
	if len(sample) != eventSize {
		return fmt.Errorf("event of %d bytes: want %d", len(sample), eventSize)
	}
	copy(unsafe.Slice((*byte)(unsafe.Pointer(e)), eventSize), sample)
	if kind := bpf.SockEventKind(e.Kind); kind < bpf.SockEventKindEVENT_BIND || kind > bpf.SockEventKindEVENT_RENAME {
		return fmt.Errorf("event kind %d: unknown", e.Kind)
	}
	if p := port.Protocol(e.Protocol); p != port.TCP && p != port.UDP {
		return fmt.Errorf("event of %v: want tcp or udp", p)
	}
	return nil
}

// Address returns an address as the kernel keeps it: network byte order, an IPv4
// address in the first four bytes.
func Address(family uint8, b [16]byte) (netip.Addr, error) {
	switch family {
	case unix.AF_INET:
		return netip.AddrFrom4([4]byte(b[:4])), nil
	case unix.AF_INET6:
		return netip.AddrFrom16(b).Unmap(), nil
	}
	return netip.Addr{}, fmt.Errorf("address family %d: want IPv4 or IPv6", family)
}

// Comm returns the name of a task.
func Comm(b [16]byte) string {
	name, _, _ := bytes.Cut(b[:], []byte{0})
	return string(name)
}
