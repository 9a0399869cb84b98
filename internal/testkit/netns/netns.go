// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package netns makes nameless network namespaces for tests and benchmarks. The
// machine's own network is not touched.
package netns

import (
	"fmt"
	"net"
	"os/exec"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/guest/kernel"
)

// Space is a network namespace with its loopback up. It lives as long as its handle and
// the processes and sockets in it.
type Space struct{ fd int }

// New makes a namespace; the caller closes it. It needs root.
func New() (*Space, error) {
	s := &Space{fd: -1}
	err := kernel.OnThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return err
		}
		fd, err := unix.Open(fmt.Sprintf("/proc/self/task/%d/ns/net", unix.Gettid()), unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		s.fd = fd
		return kernel.LoopbackUp()
	})
	if err != nil {
		return nil, fmt.Errorf("new network namespace: %w", err)
	}
	return s, nil
}

// Open returns the namespace that has a name in the file system; the caller
// closes it.
func Open(path string) (*Space, error) {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open network namespace %s: %w", path, err)
	}
	return &Space{fd: fd}, nil
}

// Close closes the handle of the namespace.
func (s *Space) Close() error { return unix.Close(s.fd) }

// FD is the descriptor of the namespace's handle in this process.
func (s *Space) FD() int { return s.fd }

// Do runs f in the namespace. Sockets that f makes stay in it, goroutines that
// it starts do not.
func (s *Space) Do(f func() error) error {
	return kernel.OnThread(func() error {
		if err := unix.Setns(s.fd, unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("enter network namespace: %w", err)
		}
		return f()
	})
}

// Start starts a command in the namespace.
func (s *Space) Start(cmd *exec.Cmd) error { return s.Do(cmd.Start) }

// Listen is net.Listen in the namespace.
func (s *Space) Listen(network, addr string) (l net.Listener, err error) {
	err = s.Do(func() error { l, err = net.Listen(network, addr); return err })
	return l, err
}

// ListenPacket is net.ListenPacket in the namespace.
func (s *Space) ListenPacket(network, addr string) (c net.PacketConn, err error) {
	err = s.Do(func() error { c, err = net.ListenPacket(network, addr); return err })
	return c, err
}

// Dial is net.Dial in the namespace, within 30 s, which is enough on a machine that
// stalls for a while.
func (s *Space) Dial(network, addr string) (c net.Conn, err error) {
	err = s.Do(func() error {
		d := net.Dialer{Timeout: 30 * time.Second}
		c, err = d.Dial(network, addr)
		return err
	})
	return c, err
}
