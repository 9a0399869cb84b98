// SPDX-License-Identifier: Apache-2.0

//go:build linux

package demo

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/config/trust"
)

// netnsDir is where ip-netns(8) keeps the names of namespaces.
const netnsDir = "/run/netns"

const namePrefix = "fairlead-demo-"

// guest is a named network namespace that is used as the guest.
type guest struct {
	name string
	path string
}

// newGuest makes the namespace with its loopback up, as `ip netns add` would,
// and removes those of demos that were killed.
func newGuest() (*guest, error) {
	removeDead()
	g := &guest{name: namePrefix + strconv.Itoa(os.Getpid())}
	g.path = filepath.Join(netnsDir, g.name)
	if err := os.MkdirAll(netnsDir, 0o755); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(g.path, os.O_CREATE|os.O_EXCL|os.O_RDONLY, 0)
	if err != nil {
		return nil, fmt.Errorf("name the namespace: %w", err)
	}
	_ = f.Close()
	err = inThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("new network namespace: %w", err)
		}
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return fmt.Errorf("loopback of the namespace: %w", err)
		}
		if err := netlink.LinkSetUp(lo); err != nil {
			return fmt.Errorf("loopback of the namespace: %w", err)
		}
		self := fmt.Sprintf("/proc/self/task/%d/ns/net", unix.Gettid())
		if err := unix.Mount(self, g.path, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("name the namespace: mount %s: %w", g.path, err)
		}
		return nil
	})
	if err != nil {
		return nil, errors.Join(err, os.Remove(g.path))
	}
	return g, nil
}

// removeDead removes namespaces of demos whose process has ended.
func removeDead() {
	old, _ := filepath.Glob(filepath.Join(netnsDir, namePrefix+"*"))
	for _, path := range old {
		pid, err := strconv.Atoi(strings.TrimPrefix(filepath.Base(path), namePrefix))
		if err == nil && errors.Is(unix.Kill(pid, 0), unix.ESRCH) {
			_ = (&guest{path: path}).Close()
		}
	}
}

// Close removes the name; the namespace ends with its last process.
func (g *guest) Close() error {
	err := unix.Unmount(g.path, unix.MNT_DETACH)
	return errors.Join(err, os.Remove(g.path))
}

// enter returns the command prefix that enters the guest.
func (g *guest) enter() string {
	if _, err := trust.Find("ip"); err == nil {
		return "ip netns exec " + g.name
	}
	return "nsenter --net=" + g.path
}

// Do runs f in the namespace, on a thread that never ends, because a child gets its
// death signal when the thread that started it ends.
func (g *guest) Do(f func() error) error {
	return onLastingThread(func() error {
		ns, err := os.Open(g.path)
		if err != nil {
			return err
		}
		defer func() { _ = ns.Close() }()
		if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("enter %s: %w", g.path, err)
		}
		return f()
	})
}

// inThread runs f on a thread that ends afterwards.
func inThread(f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		done <- f()
	}()
	return <-done
}

// onLastingThread runs f on a thread of its own that lives as long as the process.
func onLastingThread(f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		done <- f()
		select {}
	}()
	return <-done
}
