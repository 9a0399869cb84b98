// SPDX-License-Identifier: Apache-2.0

//go:build linux

package observer

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/port"
)

// message makes a netlink message, padded.
func message(kind, flags uint16, sequence uint32, payload []byte) []byte {
	b := make([]byte, netlinkHeader, netlinkHeader+len(payload)+3)
	binary.NativeEndian.PutUint32(b, uint32(netlinkHeader+len(payload)))
	binary.NativeEndian.PutUint16(b[4:], kind)
	binary.NativeEndian.PutUint16(b[6:], flags)
	binary.NativeEndian.PutUint32(b[8:], sequence)
	b = append(b, payload...)
	return append(b, make([]byte, (4-len(b)%4)%4)...)
}

func attribute(kind uint16, value []byte) []byte {
	b := make([]byte, unix.SizeofRtAttr, unix.SizeofRtAttr+len(value)+3)
	binary.NativeEndian.PutUint16(b, uint16(unix.SizeofRtAttr+len(value)))
	binary.NativeEndian.PutUint16(b[2:], kind)
	b = append(b, value...)
	return append(b, make([]byte, (4-len(b)%4)%4)...)
}

// diagMessage is a listener on [::1]:8080, bound to interface 3.
func diagMessage() []byte {
	b := make([]byte, diagMessageSize)
	b[0], b[1] = unix.AF_INET6, tcpListen
	binary.BigEndian.PutUint16(b[4:], 8080)
	b[8+15] = 1
	ne := binary.NativeEndian
	ne.PutUint32(b[40:], 3)
	ne.PutUint32(b[44:], 7)
	ne.PutUint32(b[48:], 1)
	ne.PutUint32(b[64:], 1000)
	ne.PutUint32(b[68:], 4711)
	return b
}

func answer(sequence uint32) []byte {
	row := diagMessage()
	row = append(row, attribute(diagAttrSKV6Only, []byte{1})...)
	row = append(row, attribute(77, []byte{1, 2, 3, 4, 5})...)
	row = append(row, attribute(diagAttrCgroupID, binary.NativeEndian.AppendUint64(nil, 99))...)
	b := message(sockDiagByFamily, unix.NLM_F_MULTI, sequence, row)
	any6 := diagMessage()
	any6[8+15] = 0
	b = append(b, message(sockDiagByFamily, unix.NLM_F_MULTI, sequence, append(any6, attribute(diagAttrSKV6Only, []byte{1})...))...)
	return append(b, message(unix.NLMSG_DONE, unix.NLM_F_MULTI, sequence, make([]byte, 4))...)
}

func TestParseDiag(t *testing.T) {
	var got []Socket
	done, interrupted, err := parseDiag(answer(5), 5, func(r *diagRow) { got = append(got, r.socket(port.TCP, 44)) })
	if err != nil || !done || interrupted {
		t.Fatalf("done %v, interrupted %v, %v", done, interrupted, err)
	}
	one := Socket{
		Cookie: 1<<32 + 7, Protocol: port.TCP, Address: netip.IPv6Loopback(), Port: 8080, Listening: true,
		Device: 3, NetNS: 44, CgroupID: 99, UID: 1000, Inode: 4711,
	}
	two := one
	two.Address, two.V6Only, two.CgroupID = netip.IPv6Unspecified(), true, 0
	if want := []Socket{one, two}; !slices.Equal(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
}

func TestParseDiagErrors(t *testing.T) {
	none := func(*diagRow) {}
	errno := func(e unix.Errno) []byte {
		return append(binary.NativeEndian.AppendUint32(nil, uint32(-int32(e))), make([]byte, netlinkHeader)...)
	}
	if done, _, err := parseDiag(message(unix.NLMSG_ERROR, 0, 1, errno(unix.ENOENT)), 1, none); !errors.Is(err, unix.ENOENT) || !done {
		t.Errorf("error message: %v, done %v", err, done)
	}
	if _, _, err := parseDiag(message(unix.NLMSG_DONE, 0, 1, errno(unix.EINTR)[:4]), 1, none); !errors.Is(err, unix.EINTR) {
		t.Errorf("done with an error: %v", err)
	}
	if done, cut, err := parseDiag(message(unix.NLMSG_DONE, netlinkInterrupted, 1, nil), 1, none); !done || !cut || err != nil {
		t.Errorf("interrupted: done %v, interrupted %v, %v", done, cut, err)
	}
	if done, _, err := parseDiag(answer(4), 5, func(*diagRow) { t.Error("a row of another answer") }); done || err != nil {
		t.Errorf("another answer: done %v, %v", done, err)
	}
	whole := answer(5)
	for name, b := range map[string][]byte{
		"cut":          whole[:len(whole)-1],
		"short row":    message(sockDiagByFamily, 0, 5, make([]byte, diagMessageSize-1)),
		"family":       message(sockDiagByFamily, 0, 5, make([]byte, diagMessageSize)),
		"attribute 0":  message(sockDiagByFamily, 0, 5, append(diagMessage(), 0, 0, 0, 0)),
		"attribute":    message(sockDiagByFamily, 0, 5, append(diagMessage(), 200, 0, 0, 0)),
		"message size": {1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
	} {
		if _, _, err := parseDiag(b, 5, none); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

func FuzzParseDiag(f *testing.F) {
	f.Add(answer(5))
	f.Add(message(unix.NLMSG_ERROR, 0, 5, make([]byte, 20)))
	f.Fuzz(func(t *testing.T, b []byte) {
		_, _, _ = parseDiag(b, 5, func(r *diagRow) {
			if !r.address.IsValid() || r.address.Is4In6() {
				t.Errorf("%+v", r)
			}
		})
	})
}

func TestDiagRequest(t *testing.T) {
	// Both families are asked for by the older request.
	b := diagRequest(9, unix.AF_UNSPEC, unix.IPPROTO_TCP, 1<<tcpListen)
	if ne := binary.NativeEndian; len(b) != 76 || ne.Uint32(b) != 76 || ne.Uint16(b[4:]) != tcpDiagGetSock || ne.Uint32(b[68:]) != 1<<tcpListen {
		t.Errorf("% x", b)
	}
	b = diagRequest(9, unix.AF_INET6, unix.IPPROTO_UDP, 1<<tcpClose)
	if len(b) != netlinkHeader+diagRequestSize || b[16] != unix.AF_INET6 || b[17] != unix.IPPROTO_UDP || b[20] != 1<<tcpClose {
		t.Errorf("% x", b)
	}
	// A protocol of more than a byte goes into an attribute.
	b = diagRequest(9, unix.AF_INET, protocolMPTCP, 1<<tcpListen)
	if len(b) != netlinkHeader+diagRequestSize+8 || b[17] != 0xff || binary.NativeEndian.Uint32(b[len(b)-4:]) != 262 {
		t.Errorf("% x", b)
	}
}
