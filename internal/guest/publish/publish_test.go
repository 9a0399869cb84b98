// SPDX-License-Identifier: Apache-2.0

//go:build linux

package publish

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/guest/peer"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/claims"
)

// What a container publishes never takes a host port from a server of the guest.
func TestYieldsToTheGuest(t *testing.T) {
	host := netip.MustParseAddrPort("127.0.0.1:3000")
	published := claims.Claim{Key: port.Key{Protocol: port.TCP, Address: Targets.Addr().Next(), Port: 3000}, Host: host}
	for _, a := range []string{"127.0.0.1", "0.0.0.0"} {
		guest := claims.Claim{Key: port.Key{Protocol: port.TCP, Address: netip.MustParseAddr(a), Port: 3000}, Host: host}
		for _, list := range [][]claims.Claim{{published, guest}, {guest, published}} {
			for i, v := range claims.Decide(list) {
				if list[v.Winner].Key != guest.Key {
					t.Errorf("claim %d: %v won before %v", i, list[v.Winner].Key, guest.Key)
				}
			}
		}
	}
}

// A later lease never has an address that wins the host port of an earlier one.
func TestEarlierLeaseKeepsItsPort(t *testing.T) {
	s := New(Options{})
	enter := func(as uint16) *hostLease {
		h := &hostLease{lease: &lease{s: s, request: request{As: as}}}
		if err := s.enter(h); err != nil {
			return nil
		}
		return h
	}
	s.last = netip.MustParseAddr("127.102.255.253")
	first, second := enter(80), enter(80)
	if first == nil || second == nil || !first.target.Addr().Less(second.target.Addr()) {
		t.Fatalf("%+v, %+v", first, second)
	}
	if h := enter(80); h != nil {
		t.Errorf("a third lease has %v, the first %v", h.target, first.target)
	}
	if h := enter(81); h == nil {
		t.Error("no address is left for another port")
	}
	delete(s.leases, second.target.Addr())
	if h := enter(80); h == nil || h.target != second.target {
		t.Errorf("after the second has gone: %+v", h)
	}
}

func packets(t *testing.T) (a, b *net.UnixConn) {
	t.Helper()
	l, err := net.Listen("unixpacket", filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	c, err := net.Dial("unixpacket", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	d, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = c.Close(), d.Close() })
	return c.(*net.UnixConn), d.(*net.UnixConn)
}

// Whatever arrives, receive returns no descriptor with an error, and leaves none open.
func TestReceiveLeavesNoDescriptor(t *testing.T) {
	a, b := packets(t)
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	count := func() int {
		dir, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(dir)
	}
	before := count()
	for _, c := range []struct {
		text string
		fds  int
		ok   bool
	}{
		{`{}`, 0, true}, {`{"port":1}`, 1, true}, {`{}`, 2, true}, {`{}`, 253, true}, {"{", 253, false},
		{`{`, 1, false}, {`{"port":70000}`, 1, false}, {`{"port":-1}`, 1, false}, {`[]`, 1, false}, {"\x00", 2, false},
		{"", 1, false}, {"", 2, false}, {"", 0, false},
	} {
		var rights []byte
		if c.fds > 0 {
			fds := make([]int, c.fds)
			for i := range fds {
				fds[i] = int(null.Fd())
			}
			rights = unix.UnixRights(fds...)
		}
		if err := sendRaw(a, c.text, rights); err != nil {
			t.Fatal(err)
		}
		var q request
		p, err := peer.Receive(b, &q)
		if (err == nil) != c.ok || err == nil && len(p.FDs) != c.fds || err != nil && !errors.Is(err, peer.ErrMalformed) && !(c.text == "" && errors.Is(err, io.EOF)) {
			t.Errorf("%q with %d: %v, %d descriptors", c.text, c.fds, err, len(p.FDs))
		}
		p.Close()
		if now := count(); now != before {
			t.Errorf("%q with %d: %d descriptors open, were %d", c.text, c.fds, now, before)
		}
	}
}

// sendRaw sends a message as it is: the libraries add a byte to an empty one.
func sendRaw(conn *net.UnixConn, text string, rights []byte) error {
	var h unix.Msghdr
	iov := unix.Iovec{Base: unsafe.StringData(text)}
	iov.SetLen(len(text))
	h.Iov = &iov
	h.SetIovlen(1)
	if len(rights) > 0 {
		h.Control = &rights[0]
		h.SetControllen(len(rights))
	}
	return peer.Control(conn, func(fd int) error {
		if _, _, errno := unix.Syscall(unix.SYS_SENDMSG, uintptr(fd), uintptr(unsafe.Pointer(&h)), unix.MSG_NOSIGNAL); errno != 0 {
			return errno
		}
		return nil
	})
}
