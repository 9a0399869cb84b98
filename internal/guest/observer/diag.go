// SPDX-License-Identifier: Apache-2.0

//go:build linux

package observer

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/guest/kernel"
	"github.com/fairlead/fairlead/internal/port"
)

// States of include/net/tcp_states.h, which also UDP uses.
const (
	tcpClose         = 7
	tcpListen        = 10
	tcpBoundInactive = 13 // asks for bound sockets, since Linux 6.8; they answer as tcpClose
)

// From include/uapi/linux/inet_diag.h and sock_diag.h.
const (
	tcpDiagGetSock      = 18
	sockDiagByFamily    = 20
	diagRequestSize     = 56
	oldRequestSize      = 60
	diagMessageSize     = 72
	diagReqProtocol     = 1 // request attribute
	diagAttrSKV6Only    = 11
	diagAttrCgroupID    = 21
	protocolMPTCP       = 262
	diagAttempts        = 4
	diagTimeout         = 10 * time.Second
	diagBuffer          = 64 << 10 // the kernel fills at most 32 KiB at a time
	netlinkHeader       = unix.SizeofNlMsghdr
	netlinkInterrupted  = unix.NLM_F_DUMP_INTR
	netlinkDumpFlags    = unix.NLM_F_REQUEST | unix.NLM_F_DUMP
	netlinkErrnoPayload = 4
)

// errInterrupted says that the table changed during the dump.
var errInterrupted = errors.New("dump was interrupted")

// diagConn asks the kernel for sockets of the network namespace in which it was
// opened. The libraries dump all states, drop the v6only attribute and build a value
// for each socket; this reads rows in place from one buffer.
type diagConn struct {
	fd       int
	sequence uint32
	buffer   []byte
}

func openDiag() (*diagConn, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_INET_DIAG)
	if err != nil {
		return nil, fmt.Errorf("open socket diag: %w", err)
	}
	timeout := unix.NsecToTimeval(int64(diagTimeout))
	if err := errors.Join(
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &timeout),
		unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}),
	); err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("open socket diag: %w", err)
	}
	return &diagConn{fd: fd, buffer: make([]byte, diagBuffer)}, nil
}

func (c *diagConn) close() error { return unix.Close(c.fd) }

// diagRow is one inet_diag_msg.
type diagRow struct {
	family   uint8
	state    uint8
	port     uint16
	address  netip.Addr // unmapped
	device   uint32
	cookie   uint64
	uid      uint32
	inode    uint32
	v6only   bool
	cgroupID uint64
}

// families returns those for which to dump a protocol. TCP takes both in one dump: for bound
// sockets the kernel walks the table of all ports each time. No other protocol can.
func families(protocol uint16) []uint8 {
	if protocol == unix.IPPROTO_TCP {
		return []uint8{unix.AF_UNSPEC}
	}
	return []uint8{unix.AF_INET, unix.AF_INET6}
}

// dump calls f for each socket of a family and protocol in one of the states (a
// mask). AF_UNSPEC is both families, of TCP only. After an error the rows that f received are incomplete; after
// errInterrupted another try may succeed.
func (c *diagConn) dump(family uint8, protocol uint16, states uint32, f func(*diagRow)) error {
	c.sequence++
	request := diagRequest(c.sequence, family, protocol, states)
	if err := unix.Sendto(c.fd, request, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return fmt.Errorf("socket diag: send: %w", err)
	}
	interrupted := false
	for {
		n, from, err := unix.Recvfrom(c.fd, c.buffer, 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return fmt.Errorf("socket diag: receive: %w", err)
		}
		if kernel, ok := from.(*unix.SockaddrNetlink); !ok || kernel.Pid != 0 {
			continue
		}
		done, inconsistent, err := parseDiag(c.buffer[:n], c.sequence, f)
		interrupted = interrupted || inconsistent
		if err != nil {
			return err
		}
		if done {
			if interrupted {
				return errInterrupted
			}
			return nil
		}
	}
}

func diagRequest(sequence uint32, family uint8, protocol uint16, states uint32) []byte {
	kind, size := uint16(sockDiagByFamily), netlinkHeader+diagRequestSize
	switch {
	case family == unix.AF_UNSPEC && protocol == unix.IPPROTO_TCP:
		// The older request has no family: the kernel takes each (inet_diag_dump_compat).
		kind, size = tcpDiagGetSock, netlinkHeader+oldRequestSize
	case protocol > 0xff:
		size += 8 // an attribute of four bytes
	}
	b := make([]byte, size)
	ne := binary.NativeEndian
	ne.PutUint32(b[0:], uint32(size))
	ne.PutUint16(b[4:], kind)
	ne.PutUint16(b[6:], netlinkDumpFlags)
	ne.PutUint32(b[8:], sequence)
	if kind == tcpDiagGetSock {
		ne.PutUint32(b[netlinkHeader+52:], states) // idiag_states of inet_diag_req
		return b
	}
	r := b[netlinkHeader:] // inet_diag_req_v2
	r[0] = family
	r[1] = uint8(min(protocol, 0xff))
	ne.PutUint32(r[4:], states)
	if protocol > 0xff {
		a := r[diagRequestSize:]
		ne.PutUint16(a[0:], 8)
		ne.PutUint16(a[2:], diagReqProtocol)
		ne.PutUint32(a[4:], uint32(protocol))
	}
	return b
}

// parseDiag reads one datagram of an answer. It reports whether the answer ends
// with it and whether the kernel marked it as inconsistent.
func parseDiag(b []byte, sequence uint32, f func(*diagRow)) (done, interrupted bool, err error) {
	ne := binary.NativeEndian
	for len(b) >= netlinkHeader {
		size := int(ne.Uint32(b))
		if size < netlinkHeader || size > len(b) {
			return false, interrupted, fmt.Errorf("socket diag: message of %d bytes in %d", size, len(b))
		}
		kind, flags := ne.Uint16(b[4:]), ne.Uint16(b[6:])
		payload := b[netlinkHeader:size]
		ours := ne.Uint32(b[8:]) == sequence
		b = b[min((size+3)&^3, len(b)):]
		if !ours {
			continue // part of an earlier answer that was abandoned
		}
		interrupted = interrupted || flags&netlinkInterrupted != 0
		switch kind {
		case unix.NLMSG_DONE, unix.NLMSG_ERROR:
			if len(payload) >= netlinkErrnoPayload {
				if errno := int32(ne.Uint32(payload)); errno < 0 {
					return true, interrupted, fmt.Errorf("socket diag: %w", unix.Errno(-errno))
				}
			}
			return true, interrupted, nil
		case sockDiagByFamily, tcpDiagGetSock:
			var r diagRow
			if err := r.parse(payload); err != nil {
				return false, interrupted, err
			}
			f(&r)
		}
	}
	if len(b) != 0 {
		return false, interrupted, fmt.Errorf("socket diag: %d stray bytes", len(b))
	}
	return false, interrupted, nil
}

// parse reads an inet_diag_msg and its attributes.
func (r *diagRow) parse(b []byte) error {
	if len(b) < diagMessageSize {
		return fmt.Errorf("socket diag: row of %d bytes: want %d", len(b), diagMessageSize)
	}
	ne := binary.NativeEndian
	address, err := kernel.Address(b[0], [16]byte(b[8:24]))
	if err != nil {
		return fmt.Errorf("socket diag: %w", err)
	}
	*r = diagRow{
		family:  b[0],
		state:   b[1],
		port:    binary.BigEndian.Uint16(b[4:]),
		address: address,
		device:  ne.Uint32(b[40:]),
		// Two words, the low one first.
		cookie: uint64(ne.Uint32(b[44:])) | uint64(ne.Uint32(b[48:]))<<32,
		uid:    ne.Uint32(b[64:]),
		inode:  ne.Uint32(b[68:]),
	}
	for a := b[diagMessageSize:]; len(a) >= unix.SizeofRtAttr; {
		size, kind := int(ne.Uint16(a)), ne.Uint16(a[2:])
		if size < unix.SizeofRtAttr || size > len(a) {
			return fmt.Errorf("socket diag: attribute of %d bytes in %d", size, len(a))
		}
		value := a[unix.SizeofRtAttr:size]
		switch {
		case kind == diagAttrSKV6Only && len(value) >= 1:
			r.v6only = value[0] != 0 && address == netip.IPv6Unspecified()
		case kind == diagAttrCgroupID && len(value) >= 8:
			r.cgroupID = ne.Uint64(value)
		}
		a = a[min((size+3)&^3, len(a)):]
	}
	return nil
}

// socket makes a Socket of a row.
func (r *diagRow) socket(protocol port.Protocol, netns uint32) Socket {
	return Socket{
		Cookie:    r.cookie,
		Protocol:  protocol,
		Address:   r.address,
		Port:      r.port,
		V6Only:    r.v6only,
		Listening: r.state == tcpListen || protocol == port.UDP,
		Device:    r.device,
		NetNS:     netns,
		CgroupID:  r.cgroupID,
		UID:       r.uid,
		Inode:     r.inode,
	}
}
