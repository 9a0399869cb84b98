// SPDX-License-Identifier: Apache-2.0

//go:build linux

package kernel

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// attachTracepoint attaches p to a classic tracepoint, "group/name". tracefs need
// not be mounted anywhere.
func attachTracepoint(name string, p *ebpf.Program) (io.Closer, error) {
	id, err := tracepointID(name)
	if err != nil {
		return nil, fmt.Errorf("tracepoint %s: %w", name, err)
	}
	attr := unix.PerfEventAttr{Type: unix.PERF_TYPE_TRACEPOINT, Config: id, Sample: 1, Wakeup: 1}
	attr.Size = uint32(unsafe.Sizeof(attr))
	// The program runs on every CPU, whichever the event is opened on.
	fd, err := unix.PerfEventOpen(&attr, -1, 0, -1, unix.PERF_FLAG_FD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("tracepoint %s: perf_event_open: %w", name, err)
	}
	err = unix.IoctlSetInt(fd, unix.PERF_EVENT_IOC_SET_BPF, p.FD())
	if err == nil {
		err = unix.IoctlSetInt(fd, unix.PERF_EVENT_IOC_ENABLE, 0)
	}
	if err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("tracepoint %s: attach: %w", name, err)
	}
	return closer(func() error { return unix.Close(fd) }), nil
}

// tracepointID reads a tracepoint's number from tracefs, from a private mount if
// there is no other.
func tracepointID(name string) (uint64, error) {
	file := filepath.Join("events", name, "id")
	var errs []error
	for _, root := range []string{"/sys/kernel/tracing", "/sys/kernel/debug/tracing"} {
		b, err := os.ReadFile(filepath.Join(root, file))
		if err == nil {
			return parseID(b)
		}
		errs = append(errs, err)
	}
	b, err := readTracefs(file)
	if err != nil {
		return 0, errors.Join(append(errs, err)...)
	}
	return parseID(b)
}

func parseID(b []byte) (uint64, error) {
	return strconv.ParseUint(strings.TrimSpace(string(b)), 10, 32)
}

// readTracefs reads a file of tracefs without a path to it (fsopen(2)).
func readTracefs(file string) ([]byte, error) {
	fs, err := unix.Fsopen("tracefs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("open tracefs: %w", err)
	}
	defer func() { _ = unix.Close(fs) }()
	if err := unix.FsconfigCreate(fs); err != nil {
		return nil, fmt.Errorf("make tracefs: %w", err)
	}
	root, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_RDONLY)
	if err != nil {
		return nil, fmt.Errorf("mount tracefs: %w", err)
	}
	defer func() { _ = unix.Close(root) }()
	fd, err := unix.Openat(root, file, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("tracefs: open %s: %w", file, err)
	}
	f := os.NewFile(uintptr(fd), file)
	defer func() { _ = f.Close() }()
	b, err := io.ReadAll(io.LimitReader(f, 64))
	if err != nil {
		return nil, fmt.Errorf("tracefs: read %s: %w", file, err)
	}
	return b, nil
}
