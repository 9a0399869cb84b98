// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// ThisMachine returns the machine's boot id and the inode of this process's network
// namespace, for Options.
func ThisMachine() (boot, namespace string, err error) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", "", err
	}
	link, err := os.Readlink("/proc/self/ns/net") // net:[4026531840]
	if err != nil {
		return "", "", err
	}
	return strings.TrimSpace(string(b)), strings.Trim(link, "net:[]"), nil
}

// LockNode lets one agent of this network namespace write the object of a node: an
// abstract socket, which the kernel releases when its process ends. A socket of another
// user than root and the process's own is no agent's and does not count. The caller calls
// release.
func LockNode(ctx context.Context, node string) (release func(), err error) {
	sum := sha256.Sum256([]byte(node)) // a name may be longer than that of a socket
	name := "@fairlead-inventory/" + hex.EncodeToString(sum[:16])
	l, err := new(net.ListenConfig).Listen(ctx, "unix", name)
	if errors.Is(err, syscall.EADDRINUSE) {
		uid, err := holderOf(ctx, name)
		switch {
		case err != nil:
			return nil, fmt.Errorf("%w: lock: %w", ErrHeld, err)
		case uid == 0 || uid == os.Geteuid():
			return nil, fmt.Errorf("%w: it runs on this machine: stop one of the two", ErrHeld)
		}
		return func() {}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("lock: %w", err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_ = c.Close()
		}
	}()
	return func() { _ = l.Close(); <-done }, nil
}

// holderOf returns the user who listens at a socket.
func holderOf(ctx context.Context, name string) (uid int, err error) {
	c, err := new(net.Dialer).DialContext(ctx, "unix", name)
	if err != nil {
		return 0, err
	}
	defer func() { _ = c.Close() }()
	raw, err := c.(*net.UnixConn).SyscallConn()
	if err != nil {
		return 0, err
	}
	var cred *unix.Ucred
	var serr error
	if err := raw.Control(func(fd uintptr) { cred, serr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); err != nil {
		return 0, err
	}
	if serr != nil {
		return 0, serr
	}
	return int(cred.Uid), nil
}
