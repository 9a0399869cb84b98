// SPDX-License-Identifier: Apache-2.0

//go:build linux && (root || vm)

package sockets

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// An actor is a process that owns sockets and does what the test orders. Each of its
// sockets answers clients with its number. One goroutine does everything, so that no
// descriptor is in use while it is closed.

// actorVariable makes the test binary an actor that has these sockets, by number, from
// descriptor 4 on. Descriptor 3 is a connection to the test.
const actorVariable = "FAIRLEAD_ACTOR"

// order is what the test tells an actor to do. Each is answered with a report.
type order struct {
	Do      string // a name of orders
	ID      int    // of the socket
	Family  int
	Type    int
	Proto   int
	V6Only  bool
	Reuse   bool // SO_REUSEPORT
	Device  string
	Bind    bool
	Listen  bool
	Address netip.AddrPort
}

// report is an actor's answer.
type report struct {
	Err     string // of the system call that was the point
	PID     int
	Cookie  uint64 // of the socket of the order, 0 for none
	Sockets []held
}

// held is a socket as its own options describe it.
type held struct {
	ID        int
	MPTCP     bool
	Type      int
	Local     netip.AddrPort // unmapped
	V6Only    bool
	Device    string
	Listening bool
	Connected bool
}

type actor struct {
	sockets map[int]int // descriptors by number
}

const controlFD = 3

func runActor(ids string) int {
	a := &actor{sockets: make(map[int]int)}
	for i, id := range strings.Fields(ids) {
		n, _ := strconv.Atoi(id)
		a.sockets[n] = controlFD + 1 + i
		unix.CloseOnExec(controlFD + 1 + i)
	}
	unix.CloseOnExec(controlFD)
	if ids != "" {
		a.answer(report{}, -1) // to the order that the process before this one had
	}
	for {
		if err := a.step(); err != nil {
			return 0 // the test has closed the connection
		}
	}
}

// step waits for an order or a client, and serves it.
func (a *actor) step() error {
	fds := []unix.PollFd{{Fd: controlFD, Events: unix.POLLIN}}
	ids := []int{0}
	for id, fd := range a.sockets {
		if stream, listening := isStream(fd), option(fd, unix.SOL_SOCKET, unix.SO_ACCEPTCONN) == 1; !stream || listening {
			fds = append(fds, unix.PollFd{Fd: int32(fd), Events: unix.POLLIN})
			ids = append(ids, id)
		}
	}
	if _, err := unix.Poll(fds, -1); err != nil && !errors.Is(err, unix.EINTR) {
		return err
	}
	for i := range fds[1:] {
		if fds[1+i].Revents != 0 {
			a.serve(ids[1+i])
		}
	}
	if fds[0].Revents != 0 {
		return a.obey()
	}
	return nil
}

// serve answers one client of a socket.
func (a *actor) serve(id int) {
	fd, text := a.sockets[id], []byte(strconv.Itoa(id))
	if !isStream(fd) {
		var b [64]byte
		if _, from, err := unix.Recvfrom(fd, b[:], unix.MSG_DONTWAIT); err == nil {
			_ = unix.Sendto(fd, text, unix.MSG_DONTWAIT, from)
		}
		return
	}
	if c, _, err := unix.Accept4(fd, unix.SOCK_CLOEXEC); err == nil {
		_, _ = unix.Write(c, text)
		_ = unix.Close(c)
	}
}

// obey reads one order, does it and answers. A descriptor that comes with it is the
// socket of that number.
func (a *actor) obey() error {
	b, oob := make([]byte, 64<<10), make([]byte, unix.CmsgSpace(4))
	n, oobn, _, _, err := unix.Recvmsg(controlFD, b, oob, unix.MSG_CMSG_CLOEXEC)
	if err != nil || n == 0 {
		return errors.Join(err, os.ErrClosed)
	}
	var o order
	if err := json.Unmarshal(b[:n], &o); err != nil {
		return err
	}
	if fd, ok := received(oob[:oobn]); ok {
		a.sockets[o.ID] = fd
	}
	switch o.Do {
	case "fork":
		return a.fork()
	case "give":
		fd := a.sockets[o.ID]
		delete(a.sockets, o.ID)
		a.answer(report{}, fd)
		return unix.Close(fd)
	}
	var r report
	if err := a.do(o); err != nil {
		r.Err = err.Error()
	}
	if fd, ok := a.sockets[o.ID]; ok {
		r.Cookie, _ = unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_COOKIE)
	}
	if o.Do == "look" {
		r.Sockets = a.look()
	}
	a.answer(r, -1)
	return nil
}

func (a *actor) answer(r report, fd int) {
	r.PID = os.Getpid()
	b, _ := json.Marshal(r)
	var rights []byte
	if fd >= 0 {
		rights = unix.UnixRights(fd)
	}
	_ = unix.Sendmsg(controlFD, b, rights, nil, 0)
}

// received returns the descriptor in a control message.
func received(oob []byte) (int, bool) {
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil || len(messages) == 0 {
		return 0, false
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil || len(fds) != 1 {
		return 0, false
	}
	return fds[0], true
}

// fork hands all sockets to a child, which answers the order, and ends this process.
func (a *actor) fork() error {
	runtime.LockOSThread()
	cmd := exec.Command("/proc/self/exe")
	cmd.Stderr = os.Stderr
	cmd.ExtraFiles = []*os.File{os.NewFile(controlFD, "control")}
	var ids []string
	for _, id := range slices.Sorted(maps.Keys(a.sockets)) {
		ids = append(ids, strconv.Itoa(id))
		cmd.ExtraFiles = append(cmd.ExtraFiles, os.NewFile(uintptr(a.sockets[id]), "socket"))
	}
	cmd.Env = append(os.Environ(), actorVariable+"= "+strings.Join(ids, " "))
	if err := cmd.Start(); err != nil {
		return err
	}
	os.Exit(0)
	return nil
}

func (a *actor) do(o order) error {
	fd, ok := a.sockets[o.ID]
	switch o.Do {
	case "look", "take":
		return nil
	case "open":
		return a.open(o)
	}
	if !ok {
		return fmt.Errorf("no socket %d", o.ID)
	}
	switch o.Do {
	case "listen":
		return unix.Listen(fd, 16)
	case "shutdown":
		return unix.Shutdown(fd, unix.SHUT_RDWR)
	case "close":
		delete(a.sockets, o.ID)
		return unix.Close(fd)
	case "connect":
		return unix.Connect(fd, address(o))
	case "disconnect":
		return disconnect(fd)
	case "device":
		return unix.SetsockoptString(fd, unix.SOL_SOCKET, unix.SO_BINDTODEVICE, o.Device)
	case "send":
		return unix.Sendto(fd, []byte("x"), 0, address(o))
	}
	return fmt.Errorf("order %q is not known", o.Do)
}

func (a *actor) open(o order) error {
	fd, err := unix.Socket(o.Family, o.Type|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, o.Proto)
	if err != nil {
		return err
	}
	flag := func(level, name int, set bool) {
		if err == nil && set {
			err = unix.SetsockoptInt(fd, level, name, 1)
		}
	}
	flag(unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, o.V6Only)
	flag(unix.SOL_SOCKET, unix.SO_REUSEPORT, o.Reuse)
	flag(unix.SOL_SOCKET, unix.SO_REUSEADDR, o.Type == unix.SOCK_STREAM)
	if err == nil && o.Device != "" {
		err = unix.SetsockoptString(fd, unix.SOL_SOCKET, unix.SO_BINDTODEVICE, o.Device)
	}
	if err == nil && o.Bind {
		err = unix.Bind(fd, address(o))
	}
	if err == nil && o.Listen {
		err = unix.Listen(fd, 16)
	}
	if err != nil {
		_ = unix.Close(fd)
		return err
	}
	a.sockets[o.ID] = fd
	return nil
}

// address returns the order's address for its family, IPv4 in IPv6 as mapped.
func address(o order) unix.Sockaddr {
	if o.Family == unix.AF_INET {
		return &unix.SockaddrInet4{Addr: o.Address.Addr().As4(), Port: int(o.Address.Port())}
	}
	return &unix.SockaddrInet6{Addr: o.Address.Addr().As16(), Port: int(o.Address.Port())}
}

// disconnect removes the peer.
func disconnect(fd int) error {
	none := unix.RawSockaddr{Family: unix.AF_UNSPEC}
	_, _, errno := unix.Syscall(unix.SYS_CONNECT, uintptr(fd), uintptr(unsafe.Pointer(&none)), unsafe.Sizeof(none))
	if errno != 0 {
		return errno
	}
	return nil
}

func option(fd, level, name int) int {
	v, err := unix.GetsockoptInt(fd, level, name)
	if err != nil {
		return -1
	}
	return v
}

func isStream(fd int) bool { return option(fd, unix.SOL_SOCKET, unix.SO_TYPE) == unix.SOCK_STREAM }

// look describes all sockets.
func (a *actor) look() []held {
	var list []held
	for id, fd := range a.sockets {
		h := held{
			ID: id, Type: option(fd, unix.SOL_SOCKET, unix.SO_TYPE),
			MPTCP:     option(fd, unix.SOL_SOCKET, unix.SO_PROTOCOL) == protocolMPTCP,
			V6Only:    option(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY) == 1,
			Listening: option(fd, unix.SOL_SOCKET, unix.SO_ACCEPTCONN) == 1,
		}
		h.Device, _ = unix.GetsockoptString(fd, unix.SOL_SOCKET, unix.SO_BINDTODEVICE)
		if local, err := unix.Getsockname(fd); err == nil {
			h.Local = addrPort(local)
		}
		_, err := unix.Getpeername(fd)
		h.Connected = err == nil
		list = append(list, h)
	}
	slices.SortFunc(list, func(x, y held) int { return x.ID - y.ID })
	return list
}

const protocolMPTCP = 262

func addrPort(a unix.Sockaddr) netip.AddrPort {
	switch a := a.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(a.Addr), uint16(a.Port))
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(a.Addr).Unmap(), uint16(a.Port))
	}
	return netip.AddrPort{}
}
