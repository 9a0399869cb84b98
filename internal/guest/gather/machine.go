// SPDX-License-Identifier: Apache-2.0

//go:build linux

package gather

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime/debug"
	"strconv"
	"strings"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/guest/observer"
	"github.com/fairlead/fairlead/internal/guest/wsl"
	"github.com/fairlead/fairlead/internal/status/doctor"
)

// Machine adds to f what can be seen without the agent's help: the kernel, WSL, the
// clock, limits and capabilities. The latter two are those of the process pid, or
// of this process if pid is 0.
func Machine(ctx context.Context, f *doctor.Facts, pid int) {
	f.Kernel = kernelFacts()
	// Looking at any port dumps both protocols of both families.
	if _, err := observer.Look(ctx, 1); err != nil {
		f.Kernel.Diag = err.Error()
	}
	f.WSL = ofWSL(ctx, f.Kernel.Release)
	f.Clock = clock()
	f.Caps.Whose, f.Limits.OpenFiles = "this process", -1
	proc := "/proc/self"
	if pid != 0 {
		proc = "/proc/" + strconv.Itoa(pid)
		f.Caps.Whose = fmt.Sprintf("the agent (pid %d)", pid)
		if fds, err := os.ReadDir(proc + "/fd"); err == nil {
			f.Limits.OpenFiles = len(fds)
		}
	}
	f.Caps.Effective = effectiveCaps(proc + "/status")
	f.Limits.Files = openFiles(proc + "/limits")
}

func kernelFacts() doctor.Kernel {
	k := doctor.Kernel{Release: "unknown"}
	var u unix.Utsname
	if err := unix.Uname(&u); err == nil {
		k.Release = unix.ByteSliceToString(u.Release[:])
	}
	_, err := os.Stat("/sys/kernel/btf/vmlinux")
	k.BTF = err == nil
	if b, err := os.ReadFile("/proc/sys/kernel/perf_event_paranoid"); err == nil {
		k.Paranoid, _ = strconv.Atoi(strings.TrimSpace(string(b)))
	}
	k.Config, k.ConfigFile = kernelConfig("/", k.Release)
	if b, err := os.ReadFile("/sys/kernel/security/lockdown"); err == nil {
		k.Lockdown = chosen(string(b))
	}
	nft := doctor.Module{Name: "nf_tables", For: "no NAT rules of nftables"}
	switch err := nftables(); {
	case err == nil:
		nft.Loaded = true
	case errors.Is(err, unix.EPERM):
		nft.Error = err.Error()
	}
	k.Modules = []doctor.Module{nft, vsock(openVsock())}
	return k
}

// openVsock makes a vsock socket, as a link does. The device /dev/vsock, which a container
// lacks, is not needed for that.
func openVsock() error {
	fd, err := unix.Socket(unix.AF_VSOCK, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	return unix.Close(fd)
}

// vsock judges the error of openVsock. It needs no privilege, so where it is denied, a
// filter does that.
func vsock(err error) doctor.Module {
	m := doctor.Module{Name: "vsock", Loaded: err == nil, For: "no link over vsock, only over unix sockets"}
	if errors.Is(err, fs.ErrPermission) {
		m.Error = "a seccomp filter or security module denies socket(AF_VSOCK): " + m.For
	}
	return m
}

// nftables asks for the generation of the ruleset, as the NAT source does. A
// directory in /sys/module would not show what is built in.
func nftables() error {
	c, err := netlink.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }()
	_, err = c.Execute(netlink.Message{
		Header: netlink.Header{Type: unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_GETGEN, Flags: netlink.Request},
		Data:   make([]byte, 4), // struct nfgenmsg
	})
	return err
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// ofWSL returns nil if the kernel is not WSL's.
func ofWSL(ctx context.Context, release string) *doctor.WSL {
	if !wsl.Kernel(release) {
		return nil
	}
	w := &doctor.WSL{Version: 2}
	if !strings.Contains(release, "WSL2") && !exists("/run/WSL") {
		w.Version = 1
		return w
	}
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	var err error
	if w.Networking, err = wsl.NetworkingMode(ctx); err != nil {
		w.Error = "wslinfo: " + err.Error()
	}
	return w
}

func clock() doctor.Clock {
	var c doctor.Clock
	b, _ := os.ReadFile("/sys/devices/system/clocksource/clocksource0/current_clocksource")
	c.Source = strings.TrimSpace(string(b))
	var t unix.Timex
	if _, err := unix.Adjtimex(&t); err == nil {
		c.Synchronised = t.Status&unix.STA_UNSYNC == 0
	}
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, s := range info.Settings {
			if s.Key == "vcs.time" {
				c.Built, _ = time.Parse(time.RFC3339, s.Value)
			}
		}
	}
	return c
}

// effectiveCaps reads CapEff of /proc/PID/status.
func effectiveCaps(path string) uint64 {
	for key, value := range lines(path, ":") {
		if key == "CapEff" {
			n, _ := strconv.ParseUint(value, 16, 64)
			return n
		}
	}
	return 0
}

// openFiles reads the soft limit of /proc/PID/limits.
func openFiles(path string) uint64 {
	const key = "Max open files"
	for k := range lines(path, "\x00") {
		if rest, ok := strings.CutPrefix(k, key); ok {
			if fields := strings.Fields(rest); len(fields) > 0 {
				n, _ := strconv.ParseUint(fields[0], 10, 64)
				return n
			}
		}
	}
	return 0
}

// lines yields the parts of each line before and after the separator.
func lines(path, sep string) func(func(string, string) bool) {
	return func(yield func(string, string) bool) {
		b, err := os.ReadFile(filepath.Clean(path))
		if err != nil {
			return
		}
		sc := bufio.NewScanner(bytes.NewReader(b))
		for sc.Scan() {
			k, v, _ := strings.Cut(sc.Text(), sep)
			if !yield(strings.TrimSpace(k), strings.TrimSpace(v)) {
				return
			}
		}
	}
}
