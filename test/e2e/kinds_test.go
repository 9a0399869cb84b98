// SPDX-License-Identifier: Apache-2.0

//go:build linux && (root || vm)

package e2e

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/testkit/kernels"
	"github.com/fairlead/fairlead/test/kit/echo"
	"github.com/fairlead/fairlead/test/kit/uring"
)

// A port appears, carries a connection and vanishes by which means ever its server listens,
// and the server is named. Means that the kernel does not have are left out, and recorded
// for the report of test/vm.
func TestKindsOfListeners(t *testing.T) {
	r := newRig(t).start()
	kinds := map[string]func(netip.AddrPort) (fd int, err error){}
	if kernels.MPTCP() == unix.IPPROTO_MPTCP {
		kinds["mptcp"] = listenMPTCP
	}
	for name, worker := range map[string]bool{"io_uring": false, "io_uring-worker": true} {
		ring, err := uring.Open(worker)
		if errors.Is(err, uring.ErrUnsupported) {
			continue
		} else if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = ring.Close() }()
		kinds[name] = ring.Listen
	}
	number := uint16(7000)
	for name, listen := range kinds {
		number++ // a connection that the server ended keeps its port for a while
		at := netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), number)
		seen := t.Run(name, func(t *testing.T) {
			var l net.Listener
			if err := r.guest.Do(func() error {
				fd, err := listen(at)
				if err != nil {
					return err
				}
				f := os.NewFile(uintptr(fd), name)
				defer func() { _ = f.Close() }()
				l, err = net.FileListener(f)
				return err
			}); err != nil {
				t.Fatal(err)
			}
			defer func() { _ = l.Close() }()
			go echo.Serve(l)
			r.wantState("tcp "+at.String(), "active")
			r.wantOwner("tcp "+at.String(), os.Getpid())
			_ = echoThrough(t, r, at.String()).Close()
			_ = l.Close()
			r.wantState("tcp "+at.String(), "")
		})
		if seen {
			t.Attr("capability/listener-by-"+name, "seen")
		}
	}
}

// listenMPTCP opens a socket that accepts several paths for a connection.
func listenMPTCP(at netip.AddrPort) (int, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, unix.IPPROTO_MPTCP)
	if err != nil {
		return -1, err
	}
	err = unix.Bind(fd, &unix.SockaddrInet4{Port: int(at.Port()), Addr: at.Addr().As4()})
	if err == nil {
		err = unix.Listen(fd, 16)
	}
	if err != nil {
		return -1, errors.Join(err, unix.Close(fd))
	}
	return fd, nil
}
