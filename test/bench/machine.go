// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/test/bench/report"
)

// thisMachine says where the run is made. What cannot be found out is left empty.
func thisMachine(ctx context.Context, scale Scale) report.Machine {
	m := report.Machine{
		CPU: "unknown", CPUs: runtime.NumCPU(), Go: strings.TrimPrefix(runtime.Version(), "go"),
		Date: time.Now().UTC().Truncate(time.Second), Load: load(), Scale: scale.String(),
	}
	b, _ := os.ReadFile("/proc/cpuinfo")
	for line := range strings.Lines(string(b)) {
		if key, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(key) == "model name" {
			m.CPU = strings.TrimSpace(value)
			break
		}
	}
	var info unix.Sysinfo_t
	if unix.Sysinfo(&info) == nil {
		m.MemoryMB = int(info.Totalram * uint64(info.Unit) / 1e6)
	}
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		m.Kernel = unix.ByteSliceToString(u.Release[:])
	}
	if out, err := exec.CommandContext(ctx, "git", "rev-parse", "--short=12", "HEAD").Output(); err == nil {
		m.Commit = strings.TrimSpace(string(out))
		if out, err := exec.CommandContext(ctx, "git", "status", "--porcelain", "--", ":!docs/benchmarks").Output(); err == nil && len(out) > 0 {
			m.Commit += "+"
		}
	}
	return m
}

// load returns the load averages.
func load() string {
	b, _ := os.ReadFile("/proc/loadavg")
	f := strings.Fields(string(b))
	return strings.Join(f[:min(3, len(f))], " ")
}
