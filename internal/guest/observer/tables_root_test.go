// SPDX-License-Identifier: Apache-2.0

//go:build linux && (root || vm)

package observer

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/testkit/netns"
)

// Without CAP_SYS_ADMIN, sockets of another network namespace are found in /proc.
func TestLookElsewhereWithoutSysAdmin(t *testing.T) {
	ns, err := netns.New()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ns.Close() })
	// The namespace is found by a process in it.
	holder := exec.Command("sleep", "3600")
	if err := ns.Start(holder); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = holder.Process.Kill()
		_ = holder.Wait()
	})
	listen := func(network, addr string) net.Listener {
		l, err := ns.Listen(network, addr)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = l.Close() })
		return l
	}
	n := uint16(listen("tcp4", "127.0.0.1:0").Addr().(*net.TCPAddr).Port)
	listen("tcp6", fmt.Sprintf("[::1]:%d", n))
	for network, addr := range map[string]string{"udp4": "127.0.0.1", "udp6": "[::1]"} {
		c, err := ns.ListenPacket(network, fmt.Sprintf("%s:%d", addr, n))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
	}
	var st unix.Stat_t
	if err := unix.Stat(fmt.Sprintf("/proc/%d/ns/net", holder.Process.Pid), &st); err != nil {
		t.Fatal(err)
	}
	found := map[string]bool{}
	done := make(chan error)
	go func() { done <- lookUnprivileged(n, st.Ino, holder.Process.Pid, found) }()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"tcp 127.0.0.1", "tcp ::1", "udp 127.0.0.1", "udp ::1"} {
		if !found[want] {
			t.Errorf("no %s in %v", want, found)
		}
	}
}

// lookUnprivileged looks on a thread without CAP_SYS_ADMIN, which ends after that.
func lookUnprivileged(p uint16, inode uint64, pid int, found map[string]bool) error {
	runtime.LockOSThread()
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&hdr, &data[0]); err != nil {
		return err
	}
	data[0].Effective &^= 1 << unix.CAP_SYS_ADMIN
	if err := unix.Capset(&hdr, &data[0]); err != nil {
		return err
	}
	process := fmt.Sprintf("/proc/%d", pid)
	s := space{path: process + "/ns/net", process: process, inode: inode}
	if err := unix.Access(s.path, unix.R_OK); err != nil {
		return err
	}
	list, err := lookInto(context.Background(), p, s)
	for _, f := range list {
		found[f.Protocol.String()+" "+f.Address.String()] = true
		if f.Port != p || f.Inode == 0 || f.Space != fmt.Sprintf("net:[%d]", inode) || f.Listening != (f.Protocol == port.TCP) {
			err = errors.Join(err, fmt.Errorf("found %+v: %w", f, os.ErrInvalid))
		}
	}
	return err
}
