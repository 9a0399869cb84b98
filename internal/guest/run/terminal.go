// SPDX-License-Identifier: Apache-2.0

//go:build linux

package run

import (
	"errors"
	"fmt"
	"os"
	"regexp"
	"runtime"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/guest/peer"
)

// Size is the size of a terminal's window, in characters; 0 is not known.
type Size struct {
	Rows    uint16 `json:"rows"`
	Columns uint16 `json:"columns"`
}

// Terminal is what a client has, and its program gets.
type Terminal struct {
	Size
	Type string `json:"type,omitempty"` // for terminfo(5): TERM; not set if it is empty
}

// typeSyntax matches the types of terminals, which are names of files.
var typeSyntax = regexp.MustCompile(`\A[A-Za-z0-9][A-Za-z0-9+._-]{0,63}\z`)

// environment is what the terminal adds to a program's.
func (t *Terminal) environment() []string {
	if t == nil || t.Type == "" {
		return nil
	}
	return []string{"TERM=" + t.Type}
}

// resize sets the size of a terminal of which fd is either end. Its program gets SIGWINCH if
// that is another than before.
func resize(fd int, s Size) error {
	return os.NewSyscallError("TIOCSWINSZ", unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Row: s.Rows, Col: s.Columns}))
}

// openTerminal opens a pseudo-terminal that belongs to a user, whose programs can thus open it
// by its path, as /dev/stdout too. Other users cannot. Neither end becomes the helper's own.
func openTerminal(as identity, s Size) (master, slave *os.File, err error) {
	err = onOwnThread(func() error {
		// A new terminal belongs to the file-system user of the thread that opens it. That of
		// another one could not be changed: the helper has no CAP_CHOWN.
		if err := errors.Join(unix.Setfsgid(as.GID), unix.Setfsuid(as.UID)); err != nil {
			return err
		}
		master, slave, err = openPair()
		return err
	})
	if err != nil {
		return nil, nil, fmt.Errorf("open a terminal for user %d: %w", as.UID, err)
	}
	err = errors.Join(requireOwner(slave, as.UID), peer.Control(slave, func(fd int) error { return resize(fd, s) }))
	if err != nil {
		closeAll([]*os.File{master, slave})
		return nil, nil, fmt.Errorf("prepare a terminal for user %d: %w", as.UID, err)
	}
	return master, slave, nil
}

// openPair opens both ends of a new pseudo-terminal. The master does not block.
func openPair() (master, slave *os.File, err error) {
	fd, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, nil, &os.PathError{Op: "open", Path: "/dev/ptmx", Err: err}
	}
	master = os.NewFile(uintptr(fd), "/dev/ptmx")
	slave, err = openSlave(fd)
	if err != nil {
		_ = master.Close()
	}
	return master, slave, err
}

// openSlave opens the other end of a master, wherever it is mounted, and closes it to others.
func openSlave(master int) (*os.File, error) {
	if err := unix.IoctlSetPointerInt(master, unix.TIOCSPTLCK, 0); err != nil {
		return nil, os.NewSyscallError("TIOCSPTLCK", err)
	}
	fd, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(master), unix.TIOCGPTPEER, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC)
	if errno != 0 {
		return nil, os.NewSyscallError("TIOCGPTPEER", errno)
	}
	// devpts is mounted so that a group can write to terminals (wall(1)), also sequences for them.
	if err := unix.Fchmod(int(fd), 0o600); err != nil {
		return nil, errors.Join(os.NewSyscallError("fchmod", err), unix.Close(int(fd)))
	}
	return os.NewFile(fd, "terminal"), nil
}

func requireOwner(f *os.File, uid int) error {
	st, err := f.Stat()
	if err != nil {
		return err
	}
	if got := int(st.Sys().(*syscall.Stat_t).Uid); got != uid {
		return fmt.Errorf("it belongs to user %d: mount devpts without the option uid", got)
	}
	return nil
}

// onOwnThread calls f on a thread that ends with it, with whatever f changed of it.
func onOwnThread(f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		done <- f()
	}()
	return <-done
}
