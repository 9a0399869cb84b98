// SPDX-License-Identifier: Apache-2.0

//go:build linux

package agentinstall

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// stopTimeout is how long an agent may take to end, as with the unit of systemd.
const stopTimeout = 10 * time.Second

// endAgent ends the agent that serves a control socket, if its executable is one of
// programs and no service of systemd has it. It returns the id of the process, 0 if none
// runs. With an error the process still runs.
func endAgent(ctx context.Context, control string, programs []string) (int, error) {
	pid, serves := server(ctx, control)
	if !serves {
		return 0, nil
	}
	if pid <= 0 {
		return 0, fmt.Errorf("the process at %s is in another pid namespace", control)
	}
	fd, err := unix.PidfdOpen(pid, 0)
	if errors.Is(err, unix.ESRCH) {
		return 0, nil
	}
	if err != nil {
		return pid, fmt.Errorf("open process %d: %w", pid, err)
	}
	defer func() { _ = unix.Close(fd) }()
	exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid))
	if err != nil {
		return pid, err
	}
	exe = strings.TrimSuffix(exe, " (deleted)") // replaced by another version
	if !slices.ContainsFunc(programs, func(p string) bool { return p == exe || resolved(p) == exe }) {
		return pid, fmt.Errorf("process %d at %s is %s, not %s, and was left alone", pid, control, exe, strings.Join(programs, " or "))
	}
	if groups, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid)); err == nil && strings.Contains(string(groups), "/"+service+".service") {
		return 0, nil
	}
	if err := unix.PidfdSendSignal(fd, unix.SIGTERM, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
		return pid, fmt.Errorf("end process %d: %w", pid, err)
	}
	return pid, awaitEnd(ctx, fd, pid)
}

// server returns whether a process serves a unix socket, and its id, which is 0 if it is
// not known in this pid namespace.
func server(ctx context.Context, socket string) (pid int, serves bool) {
	conn, err := new(net.Dialer).DialContext(ctx, "unix", socket)
	if err != nil {
		return 0, false
	}
	defer func() { _ = conn.Close() }()
	raw, err := conn.(*net.UnixConn).SyscallConn()
	if err != nil {
		return 0, true
	}
	_ = raw.Control(func(fd uintptr) {
		if cred, err := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); err == nil {
			pid = int(cred.Pid)
		}
	})
	return pid, true
}

// resolved follows the links of a path, if it can.
func resolved(path string) string {
	real, err := filepath.EvalSymlinks(path)
	if err != nil {
		return path
	}
	return real
}

// awaitEnd waits until the process of a pidfd has ended.
func awaitEnd(ctx context.Context, fd, pid int) error {
	const step = 100 * time.Millisecond // in which ctx is looked at
	for deadline := time.Now().Add(stopTimeout); ; {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, int(step.Milliseconds()))
		switch {
		case n > 0:
			return nil
		case err != nil && !errors.Is(err, unix.EINTR):
			return fmt.Errorf("wait for process %d: %w", pid, err)
		case ctx.Err() != nil:
			return ctx.Err()
		case time.Now().After(deadline):
			return fmt.Errorf("process %d did not end within %s", pid, stopTimeout)
		}
	}
}
