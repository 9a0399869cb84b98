// SPDX-License-Identifier: Apache-2.0

//go:build linux

package observer

import (
	"bytes"
	"net/netip"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/guest/cgroup"
	"github.com/fairlead/fairlead/internal/guest/kernel/bpf"
	"github.com/fairlead/fairlead/internal/port"
)

// sample makes a record as the kernel would.
func sample(e bpf.SockEvent) []byte {
	return bytes.Clone(unsafe.Slice((*byte)(unsafe.Pointer(&e)), int(unsafe.Sizeof(e))))
}

func listenEvent() bpf.SockEvent {
	e := bpf.SockEvent{
		Observed: 12, Cookie: 34, Cgroup: 56, Group: 4<<48 | 57, Netns: 78, Pid: 90, Uid: 12, Inode: 34, Device: 5,
		Port: 8080, Kind: uint8(bpf.SockEventKindEVENT_LISTEN), Protocol: uint8(port.TCP),
		Family: unix.AF_INET, State: tcpListen, Address: [16]byte{127, 0, 0, 53},
	}
	copy(e.Comm[:], "nginx")
	return e
}

func TestDecode(t *testing.T) {
	want := Socket{
		Cookie: 34, Protocol: port.TCP, Address: netip.MustParseAddr("127.0.0.53"), Port: 8080,
		Device: 5, NetNS: 78, CgroupID: 56, ProcessCgroup: cgroup.V1{Hierarchy: 4, ID: 57}, PID: 90, PIDSeen: 12, Comm: "nginx", UID: 12, Inode: 34, Observed: 12,
	}
	six := func(e *bpf.SockEvent, address string) {
		e.Family, e.Address = unix.AF_INET6, netip.MustParseAddr(address).As16()
	}
	for _, c := range []struct {
		name string
		edit func(*bpf.SockEvent)
		want func(*Socket)
	}{
		{"ipv4", func(*bpf.SockEvent) {}, func(*Socket) {}},
		{"ipv6", func(e *bpf.SockEvent) { six(e, "fe80::1") }, func(s *Socket) { s.Address = netip.MustParseAddr("fe80::1") }},
		{"mapped", func(e *bpf.SockEvent) { six(e, "::ffff:10.0.0.1") }, func(s *Socket) { s.Address = netip.MustParseAddr("10.0.0.1") }},
		{
			"v6only wildcard", func(e *bpf.SockEvent) { six(e, "::"); e.V6only = 1 },
			func(s *Socket) { s.Address, s.V6Only = netip.IPv6Unspecified(), true },
		},
		// The kernel sets the bit for every address that is not a wildcard.
		{"v6only loopback", func(e *bpf.SockEvent) { six(e, "::1"); e.V6only = 1 }, func(s *Socket) { s.Address = netip.IPv6Loopback() }},
		{"udp", func(e *bpf.SockEvent) { e.Protocol = uint8(port.UDP) }, func(s *Socket) { s.Protocol = port.UDP }},
		{
			"name without end", func(e *bpf.SockEvent) { copy(e.Comm[:], "0123456789abcdef") },
			func(s *Socket) { s.Comm = "0123456789abcdef" },
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			e, want := listenEvent(), want
			c.edit(&e)
			c.want(&want)
			var r record
			if err := newDecoder().decode(sample(e), &r); err != nil {
				t.Fatal(err)
			}
			if r.socket != want || r.kind != bpf.SockEventKindEVENT_LISTEN || r.state != tcpListen {
				t.Errorf("got  %+v\nwant %+v", r, want)
			}
		})
	}
}

func TestDecodeRefuses(t *testing.T) {
	valid := sample(listenEvent())
	edited := func(edit func(*bpf.SockEvent)) []byte {
		e := listenEvent()
		edit(&e)
		return sample(e)
	}
	for name, b := range map[string][]byte{
		"nothing":  nil,
		"short":    valid[:len(valid)-1],
		"long":     append(bytes.Clone(valid), 0),
		"kind 0":   edited(func(e *bpf.SockEvent) { e.Kind = 0 }),
		"kind 9":   edited(func(e *bpf.SockEvent) { e.Kind = 9 }),
		"protocol": edited(func(e *bpf.SockEvent) { e.Protocol = 1 }),
		"family":   edited(func(e *bpf.SockEvent) { e.Family = unix.AF_UNIX }),
	} {
		var r record
		if err := newDecoder().decode(b, &r); err == nil {
			t.Errorf("%s: decoded as %+v", name, r)
		}
	}
}

// What is not about a socket's beginning has only the cookie, and the interface that it reports.
func TestDecodeOfLaterEvents(t *testing.T) {
	for kind, device := range map[bpf.SockEventKind]uint32{
		bpf.SockEventKindEVENT_CLOSE: 0, bpf.SockEventKindEVENT_CONNECT: 0, bpf.SockEventKindEVENT_CHECK: 0, bpf.SockEventKindEVENT_DEVICE: 3,
	} {
		var r record
		e := bpf.SockEvent{Kind: uint8(kind), Protocol: uint8(port.UDP), Cookie: 7, Observed: 9, Port: 5, Device: device}
		want := Socket{Cookie: 7, Protocol: port.UDP, Observed: 9, Device: device}
		if err := newDecoder().decode(sample(e), &r); err != nil || r.kind != kind || r.socket != want {
			t.Errorf("kind %v: %+v, %v", kind, r, err)
		}
	}
	var r record
	e := bpf.SockEvent{Kind: uint8(bpf.SockEventKindEVENT_RENAME), Protocol: uint8(port.TCP), Observed: 9, Pid: 7}
	copy(e.Comm[:], "web")
	if err := newDecoder().decode(sample(e), &r); err != nil || r.socket != (Socket{PID: 7, Comm: "web", Observed: 9}) || r.decides() {
		t.Errorf("a process with another name: %+v, %v", r, err)
	}
}

func TestDecoderIsBounded(t *testing.T) {
	d, e := newDecoder(), listenEvent()
	var r record
	for i := range 3 * maxComms {
		e.Comm = [16]byte{byte(i), byte(i >> 8), 'x'}
		if err := d.decode(sample(e), &r); err != nil {
			t.Fatal(err)
		}
	}
	if len(d.comms) > maxComms {
		t.Errorf("%d names are kept, want at most %d", len(d.comms), maxComms)
	}
}

func FuzzDecode(f *testing.F) {
	f.Add(sample(listenEvent()))
	f.Add([]byte{})
	d := newDecoder()
	f.Fuzz(func(t *testing.T, b []byte) {
		var r record
		if err := d.decode(b, &r); err != nil {
			return
		}
		s := r.socket
		if r.kind >= bpf.SockEventKindEVENT_CLOSE {
			if s != (Socket{Cookie: s.Cookie, Protocol: s.Protocol, Device: s.Device, Observed: s.Observed}) {
				t.Errorf("%+v", s)
			}
			return
		}
		if !s.Address.IsValid() || s.Address.Is4In6() || s.Address.Zone() != "" || len(s.Comm) > 16 {
			t.Errorf("%+v", s)
		}
	})
}
