// SPDX-License-Identifier: Apache-2.0

//go:build unix

package forward

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"
)

func rawConn(conn net.Conn) syscall.RawConn {
	sc, ok := conn.(syscall.Conn)
	if !ok {
		return nil
	}
	rc, err := sc.SyscallConn()
	if err != nil {
		return nil
	}
	return rc
}

// receive takes a datagram, and reports false if there is none.
func (r *Receiver) receive(fd uintptr) bool {
	r.frame = BorrowFrame()
	err := r.recv(int(fd))
	for errors.Is(err, unix.EINTR) {
		err = r.recv(int(fd))
	}
	if err == nil {
		r.err = nil
		return true
	}
	r.frame.Return()
	r.frame = nil
	r.err = os.NewSyscallError("recvfrom", err)
	return !errors.Is(err, unix.EAGAIN)
}

// recv does it by read(2) if the other end is known. Else by the syscall package:
// golang.org/x/sys/unix asks the socket for its protocol each time.
func (r *Receiver) recv(fd int) (err error) {
	b := r.frame[FrameHead:]
	if !r.anyone {
		r.n, err = unix.Read(fd, b)
		return err
	}
	var from syscall.Sockaddr
	var at netip.Addr
	if len(r.told) == 0 {
		r.n, from, err = syscall.Recvfrom(fd, b, 0)
	} else {
		var told int
		r.n, told, _, from, err = syscall.Recvmsg(fd, b, r.told, 0)
		at = arrivedAt(r.told[:max(told, 0)])
	}
	r.from = Client{addrPort(from), at}
	return err
}

// addrPort is a as the net package has it, but for the zone, which is a number.
func addrPort(a syscall.Sockaddr) netip.AddrPort {
	switch a := a.(type) {
	case *syscall.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(a.Addr), uint16(a.Port))
	case *syscall.SockaddrInet6:
		ip := netip.AddrFrom16(a.Addr).Unmap()
		if a.ZoneId != 0 && ip.Is6() {
			ip = ip.WithZone(strconv.FormatUint(uint64(a.ZoneId), 10))
		}
		return netip.AddrPortFrom(ip, uint16(a.Port))
	}
	return netip.AddrPort{}
}

// named returns an address of addrPort as the net package has it. For a zone that is a number,
// the net package would list all interfaces for each datagram.
func named(a netip.AddrPort) netip.AddrPort {
	index, err := strconv.Atoi(a.Addr().Zone())
	if err != nil {
		return a
	}
	i, err := net.InterfaceByIndex(index)
	if err != nil {
		return a // gone, and with it the client
	}
	return netip.AddrPortFrom(a.Addr().WithZone(i.Name), a.Port())
}
