// SPDX-License-Identifier: Apache-2.0

//go:build linux

package publish

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/guest/peer"
)

// playRole runs in a process of its own, in a container's network namespace. It prints
// "granted", or a refusal as JSON.
func playRole(role string) int {
	name, args, _ := strings.Cut(role, " ")
	f := strings.Fields(args)
	err := roles[name](f)
	var r *peer.Refusal
	switch {
	case errors.As(err, &r):
		_ = json.NewEncoder(os.Stdout).Encode(r)
		return 3
	case err != nil:
		fmt.Println(err)
		return 1
	}
	return 0
}

// roles get the path of the socket and a port.
var roles = map[string]func(args []string) error{
	"hold":       hold,
	"tohost":     toHost,
	"udp":        func(a []string) error { return pass(a, open(unix.SOCK_DGRAM, false), 0) },
	"unlistened": func(a []string) error { return pass(a, open(unix.SOCK_STREAM, false), 0) },
	"wildcard":   func(a []string) error { return pass(a, wildcard, 0) },
	"file":       func(a []string) error { return pass(a, devNull, 0) },
	"unix":       func(a []string) error { return pass(a, unixListener, 0) },
	"inherited":  func(a []string) error { return pass(a, func() (int, error) { return 3, nil }, 0) },
	"two":        func(a []string) error { return pass(a, open(unix.SOCK_STREAM, true), 1) },
	"many":       func(a []string) error { return pass(a, open(unix.SOCK_STREAM, true), 100) },
	"none":       func(a []string) error { return pass(a, func() (int, error) { return -1, nil }, 0) },
	"mptcp":      mptcp,
	"blocking":   blocking,
	"silent":     silent,
	"nonce":      wrongNonce,
	"garbage":    garbage,
	"other":      otherProcess,
	"say":        say,
	"early":      early,
	"flood":      flood,
	"liar":       liar,
	"mute":       mute,
	"unasked":    unasked,
	"lingers":    lingers,
	"relisten":   relisten,
	"handsover":  handsOver,
	"delegates":  delegates,
	"answer":     answerConnect,
}

func hold(a []string) error {
	n, _ := strconv.Atoi(a[1])
	as := n
	if len(a) > 2 {
		as, _ = strconv.Atoi(a[2])
	}
	return Hold(context.Background(), a[0], Request{Port: uint16(n), As: uint16(as)}, func() { fmt.Println("granted") })
}

func toHost(a []string) error {
	n, _ := strconv.Atoi(a[1])
	as, _ := strconv.Atoi(a[2])
	return Hold(context.Background(), a[0], Request{ToHost: true, Port: uint16(n), As: uint16(as)}, func() { fmt.Println("granted") })
}

// open returns a TCP or UDP socket on the loopback.
func open(kind int, listens bool) func() (int, error) {
	return func() (int, error) {
		fd, err := unix.Socket(unix.AF_INET, kind|unix.SOCK_CLOEXEC, 0)
		if err == nil {
			err = unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}})
		}
		if err == nil && listens {
			err = unix.Listen(fd, 8)
		}
		return fd, err
	}
}

func wildcard() (int, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err == nil {
		err = unix.Listen(fd, 8)
	}
	return fd, err
}

func devNull() (int, error) { return unix.Open("/dev/null", unix.O_RDWR|unix.O_CLOEXEC, 0) }

func unixListener() (int, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err == nil {
		err = unix.Bind(fd, &unix.SockaddrUnix{Name: "@fairlead-publish-" + strconv.Itoa(os.Getpid())})
	}
	if err == nil {
		err = unix.Listen(fd, 8)
	}
	return fd, err
}

// begin connects and returns the nonce.
func begin(socket string) (*net.UnixConn, string, error) {
	conn, err := peer.Connect(context.Background(), socket)
	if err != nil {
		return nil, "", err
	}
	m, err := (&client{conn: conn}).receive()
	return conn, m.Nonce, err
}

// end waits for what the agent says.
func end(conn *net.UnixConn) error {
	c := &client{conn: conn}
	for {
		m, err := c.receive()
		if err != nil {
			return err
		}
		if m.Granted {
			fmt.Println("granted")
		}
	}
}

// pass asks for a port with a descriptor, and extra copies of it.
func pass(a []string, socket func() (int, error), extra int) error {
	conn, nonce, err := begin(a[0])
	if err != nil {
		return err
	}
	fd, err := socket()
	if err != nil {
		return err
	}
	n, _ := strconv.Atoi(a[1])
	b, err := json.Marshal(request{Nonce: nonce, Port: uint16(n)})
	if err != nil {
		return err
	}
	var rights []byte
	if fd >= 0 {
		fds := []int{fd}
		for range extra {
			fds = append(fds, fd)
		}
		rights = unix.UnixRights(fds...)
	}
	if _, _, err := conn.WriteMsgUnix(b, rights, nil); err != nil {
		return err
	}
	return end(conn)
}

func mptcp(a []string) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, unix.IPPROTO_MPTCP)
	if err != nil {
		return fmt.Errorf("no MPTCP: %w", err)
	}
	n, _ := strconv.Atoi(a[2])
	if err := errors.Join(unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}, Port: n}), unix.Listen(fd, 8)); err != nil {
		return err
	}
	return pass(a, func() (int, error) { return fd, nil }, 0)
}

// relisten gives up its lease, but listens again and again on a blocking socket.
func relisten(a []string) error {
	n, _ := strconv.Atoi(a[2])
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err := errors.Join(err, unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}, Port: n}), unix.Listen(fd, 8)); err != nil {
		return err
	}
	for range 8 {
		go func() {
			for {
				_ = unix.Listen(fd, 8)
				_ = unix.SetNonblock(fd, false)
			}
		}()
	}
	conn, nonce, err := begin(a[0])
	if err != nil {
		return err
	}
	to, _ := strconv.Atoi(a[1])
	if err := peer.Send(conn, request{Nonce: nonce, Port: uint16(to)}, fd); err != nil {
		return err
	}
	if _, err := (&client{conn: conn}).receive(); err != nil {
		return err
	}
	fmt.Println("granted")
	time.Sleep(50 * time.Millisecond) // the agent accepts
	_ = conn.Close()
	fmt.Println("closed")
	select {}
}

// blocking makes its listener blocking after it was passed, and keeps it.
func blocking(a []string) error {
	n, _ := strconv.Atoi(a[2])
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err := errors.Join(err, unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}, Port: n}), unix.Listen(fd, 8)); err != nil {
		return err
	}
	go func() {
		for {
			_ = unix.SetNonblock(fd, false)
			time.Sleep(time.Millisecond)
		}
	}()
	// A process that keeps the listener when this one ends.
	keeper := exec.Command("sleep", "60")
	keeper.ExtraFiles = []*os.File{os.NewFile(uintptr(fd), "listener")}
	if err := keeper.Start(); err != nil {
		return err
	}
	fmt.Println("keeper", keeper.Process.Pid)
	return pass(a, func() (int, error) { return fd, nil }, 0)
}

func silent(a []string) error {
	conn, _, err := begin(a[0])
	if err != nil {
		return err
	}
	fmt.Println("granted") // so far
	return end(conn)
}

func wrongNonce(a []string) error {
	conn, _, err := begin(a[0])
	if err == nil {
		err = peer.Send(conn, request{Nonce: "another", Port: 1})
	}
	if err != nil {
		return err
	}
	return end(conn)
}

func garbage(a []string) error {
	conn, _, err := begin(a[0])
	if err == nil {
		_, err = conn.Write([]byte(a[1]))
	}
	if err != nil {
		return err
	}
	return end(conn)
}

// otherProcess has a child send the request.
func otherProcess(a []string) error {
	conn, nonce, err := begin(a[0])
	if err != nil {
		return err
	}
	if err := sayAs(conn, "say "+nonce); err != nil {
		return err
	}
	return end(conn)
}

// handsOver has a lease, and passes its connection to a process that outlives it.
func handsOver(a []string) error {
	conn, err := publishing(a)
	if err != nil {
		return err
	}
	return handOver(conn)
}

func handOver(conn *net.UnixConn) error {
	c := &client{conn: conn}
	if _, err := c.receive(); err != nil {
		return err
	}
	f, err := conn.File()
	if err != nil {
		return err
	}
	keeper := exec.Command("sleep", "60")
	keeper.ExtraFiles = []*os.File{f}
	if err := keeper.Start(); err != nil {
		return err
	}
	fmt.Println("keeper", keeper.Process.Pid)
	fmt.Println("granted")
	return end(conn)
}

// delegates has a child answer for it.
func delegates(a []string) error {
	conn, err := publishing(a)
	if err != nil {
		return err
	}
	c := &client{conn: conn}
	for {
		m, err := c.receive()
		switch {
		case err != nil:
			return err
		case m.Granted:
			fmt.Println("granted")
		case m.Connect != 0:
			if err := sayAs(conn, "answer "+strconv.FormatUint(m.Connect, 10)); err != nil {
				return err
			}
		}
	}
}

// sayAs has a child send a message.
func sayAs(conn *net.UnixConn, role string) error {
	f, err := conn.File()
	if err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), roleVariable+"="+role)
	cmd.ExtraFiles = []*os.File{f}
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	return nil
}

// answerConnect sends an answer on the inherited connection.
func answerConnect(a []string) error {
	c, err := net.FileConn(os.NewFile(3, "conn"))
	if err != nil {
		return err
	}
	id, _ := strconv.ParseUint(a[0], 10, 64)
	return peer.Send(c.(*net.UnixConn), request{Connect: id, Refused: true})
}

// say sends a request on the inherited connection.
func say(a []string) error {
	c, err := net.FileConn(os.NewFile(3, "conn"))
	if err != nil {
		return err
	}
	return peer.Send(c.(*net.UnixConn), request{Nonce: a[0], ToHost: true, Port: 1, As: 1})
}

// early ends between the connection and the request, without a word.
func early(a []string) error {
	_, _, err := begin(a[0])
	return err
}

// flood makes so many connections as fast as it can, and prints how many were refused for
// the limit.
func flood(a []string) error {
	n, _ := strconv.Atoi(a[1])
	limited := 0
	for range n {
		conn, _, err := begin(a[0])
		var r *peer.Refusal
		if errors.As(err, &r) && r.Reason == peer.ReasonLimit {
			limited++
		}
		if conn != nil {
			_ = conn.Close()
		}
	}
	fmt.Println(limited)
	return nil
}

// publishing has a lease to the host without a program that answers.
func publishing(a []string) (*net.UnixConn, error) {
	conn, nonce, err := begin(a[0])
	if err != nil {
		return nil, err
	}
	as, _ := strconv.Atoi(a[1])
	return conn, peer.Send(conn, request{Nonce: nonce, ToHost: true, Port: 1, As: uint16(as)})
}

// liar answers with a socket that it inherited.
func liar(a []string) error {
	conn, err := publishing(a)
	if err != nil {
		return err
	}
	c := &client{conn: conn}
	for {
		m, err := c.receive()
		if err != nil {
			return err
		}
		if m.Granted {
			fmt.Println("granted")
		}
		if m.Connect != 0 {
			if err := peer.Send(conn, request{Connect: m.Connect}, 3); err != nil {
				return err
			}
		}
	}
}

// mute never answers.
func mute(a []string) error {
	conn, err := publishing(a)
	if err != nil {
		return err
	}
	return end(conn)
}

// unasked answers what was not asked.
func unasked(a []string) error {
	conn, err := publishing(a)
	if err == nil {
		err = peer.Send(conn, request{Connect: 7})
	}
	if err != nil {
		return err
	}
	return end(conn)
}

// connectedTo returns a connection to a port of the loopback.
func connectedTo(number int) (int, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	return fd, unix.Connect(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}, Port: number})
}

// linger has close(2) wait for an hour.
func linger(fd int) error {
	return unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1, Linger: 3600})
}

// fill writes to a connection until its buffers are full, and has close(2) wait for them.
func fill(fd int) error {
	b := make([]byte, 1<<20)
	for {
		if _, err := unix.SendmsgN(fd, b, nil, nil, unix.MSG_DONTWAIT); err == unix.EAGAIN {
			return linger(fd)
		} else if err != nil {
			return err
		}
	}
}

// lingers passes connections that block close(2) to an agent that does not read them.
func lingers(a []string) error {
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		return err
	}
	var kept []*net.UnixConn
	for range 20 {
		conn, err := peer.Connect(context.Background(), a[0])
		if err != nil {
			return err
		}
		kept = append(kept, conn)
		fd, err := connectedTo(l.Addr().(*net.TCPAddr).Port)
		if err == nil {
			err = fill(fd)
		}
		if err != nil {
			return err
		}
		_ = peer.Send(conn, request{}, fd) // the agent may have refused the connection already
		if err := linger(fd); err != nil {
			return err
		}
		go func() { _ = unix.Close(fd) }() // which blocks if the message was not sent
	}
	fmt.Println("granted") // so far
	time.Sleep(time.Hour)
	runtime.KeepAlive(kept)
	return l.Close()
}
