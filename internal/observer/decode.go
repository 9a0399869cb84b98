// SPDX-License-Identifier: Apache-2.0

//go:build linux

package observer

import (
	"bytes"
	"fmt"
	"net/netip"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/port"
)

// record is a decoded event of the ring buffer.
type record struct {
	kind   sockEventKind
	state  uint8
	socket Socket
}

const eventSize = int(unsafe.Sizeof(sockEvent{}))

// decoder decodes events without allocating: names of tasks are few and are
// made into a string once.
type decoder struct {
	comms map[[16]byte]string
}

// A guest can make as many names as it likes.
const maxComms = 1024

func newDecoder() *decoder { return &decoder{comms: make(map[[16]byte]string)} }

// decode reads one sample of the ring buffer, which it does not keep.
func (d *decoder) decode(sample []byte, r *record) error {
	if len(sample) != eventSize {
		return fmt.Errorf("event of %d bytes: want %d", len(sample), eventSize)
	}
	var e sockEvent
	copy(unsafe.Slice((*byte)(unsafe.Pointer(&e)), eventSize), sample)

	kind := sockEventKind(e.Kind)
	if kind < sockEventKindEVENT_BIND || kind > sockEventKindEVENT_CHECK {
		return fmt.Errorf("event kind %d: unknown", e.Kind)
	}
	protocol := port.Protocol(e.Protocol)
	if protocol != port.TCP && protocol != port.UDP {
		return fmt.Errorf("event of %v: want tcp or udp", protocol)
	}
	switch kind {
	case sockEventKindEVENT_CLOSE, sockEventKindEVENT_CONNECT, sockEventKindEVENT_CHECK:
		*r = record{kind: kind, socket: Socket{Cookie: e.Cookie, Protocol: protocol, Observed: int64(e.Observed)}}
		return nil
	}
	address, err := localAddress(e.Family, e.Address)
	if err != nil {
		return fmt.Errorf("event: %w", err)
	}
	*r = record{
		kind:  kind,
		state: e.State,
		socket: Socket{
			Cookie:   e.Cookie,
			Protocol: protocol,
			Address:  address,
			Port:     e.Port,
			V6Only:   e.V6only != 0 && address == netip.IPv6Unspecified(),
			Device:   e.Device,
			NetNS:    e.Netns,
			CgroupID: e.Cgroup,
			PID:      e.Pid,
			Comm:     d.comm(e.Comm),
			UID:      e.Uid,
			Inode:    e.Inode,
			Observed: int64(e.Observed),
		},
	}
	if e.Pid != 0 {
		r.socket.PIDSeen = r.socket.Observed
	}
	return nil
}

func (d *decoder) comm(b [16]byte) string {
	if s, ok := d.comms[b]; ok {
		return s
	}
	if len(d.comms) >= maxComms {
		clear(d.comms)
	}
	name, _, _ := bytes.Cut(b[:], []byte{0})
	s := string(name)
	d.comms[b] = s
	return s
}

// localAddress makes an address of what the kernel keeps: network byte order,
// an IPv4 address in the first four bytes.
func localAddress(family uint8, b [16]byte) (netip.Addr, error) {
	switch family {
	case unix.AF_INET:
		return netip.AddrFrom4([4]byte(b[:4])), nil
	case unix.AF_INET6:
		return netip.AddrFrom16(b).Unmap(), nil
	}
	return netip.Addr{}, fmt.Errorf("address family %d: want IPv4 or IPv6", family)
}
