// SPDX-License-Identifier: Apache-2.0

//go:build linux

package peer

import (
	"context"
	"errors"
	"net"
	"os"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/port"
)

// A message counts only if the process that connected sent it, in the guest also as the
// same user.
func TestSender(t *testing.T) {
	for _, c := range []struct {
		conn   Conn
		sender *unix.Ucred
		ok     bool
	}{
		{Conn{Client: Client{PID: 5}}, nil, false},
		{Conn{Client: Client{PID: 5}}, &unix.Ucred{Pid: 6}, false},
		{Conn{Client: Client{PID: 5}}, &unix.Ucred{Pid: 5, Uid: 7}, true},
		{Conn{Client: Client{PID: 5, Guest: true, UID: 7}}, &unix.Ucred{Pid: 5, Uid: 7}, true},
		{Conn{Client: Client{PID: 5, Guest: true, UID: 0}}, &unix.Ucred{Pid: 5, Uid: 7}, false}, // a program with the setuid bit
	} {
		if err := c.conn.Sent(c.sender); (err == nil) != c.ok {
			t.Errorf("%+v, %+v: %v", c.conn.Client, c.sender, err)
		}
	}
}

// A lack of descriptors is no sign that a process has ended.
func TestLackOfDescriptors(t *testing.T) {
	self, err := unix.Open("/proc/self", unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(self)
	asked := errors.New("the engines were asked")
	s := NewServer(Options{Container: func(context.Context, []string) (port.Owner, error) { return port.Owner{}, asked }})
	restore := noDescriptors(t)
	_, err = s.containerAt(t.Context(), self)
	restore()
	if err == nil || errors.Is(err, ErrProcessEnded) {
		t.Errorf("without descriptors: %v", err)
	}
	var r *Refusal
	if _, err := s.containerAt(t.Context(), self); !errors.As(err, &r) || r.Message != asked.Error() {
		t.Errorf("with descriptors: %v", err)
	}
}

// noDescriptors leaves this process no descriptor until restore is called.
func noDescriptors(t *testing.T) (restore func()) {
	t.Helper()
	var limit unix.Rlimit
	free, err := unix.Open(os.DevNull, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err == nil {
		err = errors.Join(unix.Close(free), unix.Getrlimit(unix.RLIMIT_NOFILE, &limit))
	}
	if err == nil {
		err = unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: uint64(free), Max: limit.Max})
	}
	if err != nil {
		t.Fatal(err)
	}
	restore = sync.OnceFunc(func() { _ = unix.Setrlimit(unix.RLIMIT_NOFILE, &limit) })
	t.Cleanup(restore)
	return restore
}

// A process of the guest is a client where no engine knows it, and not where none could be asked.
func TestProcessOfTheGuest(t *testing.T) {
	for _, c := range []struct {
		err    error
		guests bool
		want   Reason // "": it is the guest's
	}{
		{errors.New("no engine knows its container"), true, ""},
		{errors.New("no engine knows its container"), false, ReasonContainer},
		{Refuse(ReasonAgent, "it does not run"), true, ReasonAgent},
	} {
		s := NewServer(Options{Guests: c.guests, Container: func(context.Context, []string) (port.Owner, error) { return port.Owner{}, c.err }})
		var err error
		if s.guest, err = namespacesHere(); err != nil {
			t.Fatal(err)
		}
		fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		f := os.NewFile(uintptr(fds[0]), "socket")
		conn, err := net.FileConn(f)
		_, _ = f.Close(), unix.Close(fds[1])
		if err != nil {
			t.Fatal(err)
		}
		client := &Conn{UnixConn: conn.(*net.UnixConn), server: s, dir: -1}
		switch err := client.identify(t.Context()); {
		case c.want == "" && (err != nil || !client.Guest || client.PID != int32(os.Getpid())):
			t.Errorf("%+v: %+v, %v", c, client.Client, err)
		case c.want != "" && (client.Guest || !reasonIs(err, c.want)):
			t.Errorf("%+v: %+v, %v", c, client.Client, err)
		}
		client.close()
		_ = conn.Close()
	}
}

// The state of a process is that after its name, whatever the name has.
func TestEnded(t *testing.T) {
	for stat, want := range map[string]bool{
		"7 (a) S 1 7": false, "7 (a) Z 1 7": true, "7 (a) X 1": true, "7 (a) Z) S 1": false, "7 (a) S) Z 1": true, "": true, "7 (a)": true,
	} {
		if got := ended([]byte(stat)); got != want {
			t.Errorf("%q: %v", stat, got)
		}
	}
}
