// SPDX-License-Identifier: Apache-2.0

//go:build linux

package peer

import (
	"context"
	"errors"
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
