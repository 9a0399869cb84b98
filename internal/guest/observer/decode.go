// SPDX-License-Identifier: Apache-2.0

//go:build linux

package observer

import (
	"fmt"
	"net/netip"

	"github.com/fairlead/fairlead/internal/guest/cgroup"
	"github.com/fairlead/fairlead/internal/guest/kernel"
	"github.com/fairlead/fairlead/internal/guest/kernel/bpf"
	"github.com/fairlead/fairlead/internal/port"
)

// record is a decoded event of the ring buffer.
type record struct {
	kind   bpf.SockEventKind
	state  uint8
	socket Socket
}

// decoder decodes events without allocating: it keeps the names of tasks, which
// are few.
type decoder struct {
	comms map[[16]byte]string
}

// maxComms bounds the memory for names: processes can choose any number of them.
const maxComms = 1024

func newDecoder() *decoder { return &decoder{comms: make(map[[16]byte]string)} }

// decode reads one sample of the ring buffer, which it does not keep.
func (d *decoder) decode(sample []byte, r *record) error {
	var e bpf.SockEvent
	if err := kernel.DecodeEvent(sample, &e); err != nil {
		return err
	}
	kind, protocol := bpf.SockEventKind(e.Kind), port.Protocol(e.Protocol)
	switch kind {
	case bpf.SockEventKindEVENT_CLOSE, bpf.SockEventKindEVENT_CONNECT, bpf.SockEventKindEVENT_CHECK, bpf.SockEventKindEVENT_DEVICE:
		*r = record{kind: kind, socket: Socket{Cookie: e.Cookie, Protocol: protocol, Device: e.Device, Observed: int64(e.Observed)}}
		return nil
	}
	if kind == bpf.SockEventKindEVENT_RENAME {
		*r = record{kind: kind, socket: Socket{PID: e.Pid, Comm: d.comm(e.Comm), Observed: int64(e.Observed)}}
		return nil
	}
	address, err := kernel.Address(e.Family, e.Address)
	if err != nil {
		return fmt.Errorf("event: %w", err)
	}
	*r = record{
		kind:  kind,
		state: e.State,
		socket: Socket{
			Cookie:        e.Cookie,
			Protocol:      protocol,
			Address:       address,
			Port:          e.Port,
			V6Only:        e.V6only != 0 && address == netip.IPv6Unspecified(),
			Device:        e.Device,
			NetNS:         e.Netns,
			CgroupID:      e.Cgroup,
			ProcessCgroup: processCgroup(e.Group),
			PID:           e.Pid,
			Comm:          d.comm(e.Comm),
			UID:           e.Uid,
			Inode:         e.Inode,
			Observed:      int64(e.Observed),
		},
	}
	if e.Pid != 0 {
		r.socket.PIDSeen = r.socket.Observed
	}
	return nil
}

// processCgroup takes the number of the hierarchy off an id.
func processCgroup(group uint64) cgroup.V1 {
	const bits = bpf.SockGroupGROUP_BITS
	return cgroup.V1{Hierarchy: uint32(group >> bits), ID: group & (1<<bits - 1)}
}

func (d *decoder) comm(b [16]byte) string {
	if s, ok := d.comms[b]; ok {
		return s
	}
	if len(d.comms) >= maxComms {
		clear(d.comms)
	}
	s := kernel.Comm(b)
	d.comms[b] = s
	return s
}
