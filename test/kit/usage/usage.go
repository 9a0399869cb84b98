// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package usage reads the resources that a process uses, for tests and benchmarks.
package usage

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Usage is what a process has used so far, and its memory now.
type Usage struct {
	At       time.Time // when it was read
	CPU      time.Duration
	Switches int64 // context switches of all threads that still exist
	// RSS is the resident memory in bytes, Peak its maximum so far. Anon and File are
	// the parts that no file backs, and that one does.
	RSS, Peak, Anon, File int64
}

// Of reads the usage of a process. It is an error if the process has ended.
func Of(pid int) (Usage, error) {
	var t unix.Timespec
	if err := unix.ClockGettime(int32(^pid<<3|2), &t); err != nil { // its CPUCLOCK_SCHED, see clock_getcpuclockid(3)
		return Usage{}, fmt.Errorf("CPU time of process %d: %w", pid, err)
	}
	u := Usage{At: time.Now(), CPU: time.Duration(t.Nano())}
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", pid))
	if err != nil {
		return Usage{}, err
	}
	for _, task := range tasks {
		status, _ := os.ReadFile(task) // empty if the thread has ended
		for line := range strings.Lines(string(status)) {
			u.field(strings.Fields(line))
		}
	}
	if u.RSS == 0 {
		return Usage{}, fmt.Errorf("process %d has no memory", pid)
	}
	return u, nil
}

// field reads a line of proc_pid_status(5).
func (u *Usage) field(f []string) {
	if len(f) < 2 {
		return
	}
	n, _ := strconv.ParseInt(f[1], 10, 64)
	switch f[0] {
	case "voluntary_ctxt_switches:", "nonvoluntary_ctxt_switches:":
		u.Switches += n
	case "VmRSS:":
		u.RSS = n << 10
	case "VmHWM:":
		u.Peak = n << 10
	case "RssAnon:":
		u.Anon = n << 10
	case "RssFile:":
		u.File = n << 10
	}
}
