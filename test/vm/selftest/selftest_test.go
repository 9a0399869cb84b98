// SPDX-License-Identifier: Apache-2.0

//go:build linux && vm

// Package selftest checks from inside that the machines of test/vm are what
// other tests rely on.
package selftest

import (
	"os"
	"os/exec"
	"strings"
	"testing"
)

func run(t *testing.T, name string, args ...string) string {
	t.Helper()
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

func TestMounts(t *testing.T) {
	for _, file := range []string{
		"/sys/kernel/btf/vmlinux", "/sys/kernel/btf/nf_tables", "/sys/kernel/tracing/kprobe_events",
		"/sys/kernel/debug/tracing", "/sys/fs/bpf", "/sys/fs/cgroup/cgroup.procs", "/dev/vsock", "/dev/kmsg",
	} {
		if _, err := os.Stat(file); err != nil {
			t.Error(err)
		}
	}
}
