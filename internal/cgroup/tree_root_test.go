// SPDX-License-Identifier: Apache-2.0

//go:build linux && (root || vm)

package cgroup

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"
	"testing"
	"time"
)

func TestPathOfID(t *testing.T) {
	tree, err := Open("")
	if err != nil {
		t.Fatal(err)
	}
	defer tree.Close()
	if tree.mount == "" {
		t.Fatal("cgroup2 is not mounted: mount -t cgroup2 none /sys/fs/cgroup")
	}
	top := fmt.Sprintf("/fairlead-test-%d", os.Getpid())
	path := top + "/docker-x.scope"
	if err := os.MkdirAll(filepath.Join(tree.mount, path), 0o755); err != nil {
		t.Fatal(err)
	}
	remove := func() {
		_ = os.Remove(filepath.Join(tree.mount, path))
		_ = os.Remove(filepath.Join(tree.mount, top))
	}
	t.Cleanup(remove)
	id := func(path string) uint64 {
		fi, err := os.Stat(filepath.Join(tree.mount, path))
		if err != nil {
			t.Fatal(err)
		}
		return fi.Sys().(*syscall.Stat_t).Ino
	}
	inner := id(path)
	outer := id(top)
	if got := tree.Path(inner); !slices.Equal(got, []string{path}) {
		t.Errorf("path of %d = %q, want %q", inner, got, path)
	}
	if got := tree.Path(id("/")); got != nil {
		t.Errorf("the root has path %q", got)
	}
	remove()
	if got := tree.Path(inner); !slices.Equal(got, []string{path}) {
		t.Errorf("a socket of a cgroup that was removed lost its path: %q", got)
	}
	for _, gone := range []uint64{outer, 1 << 60, 0} {
		if got := tree.Path(gone); got != nil {
			t.Errorf("cgroup %d, which is not there, has path %q", gone, got)
		}
	}
	for i := range uint64(3 * maxNames) {
		tree.Path(1<<50 + i)
	}
	if len(tree.names) > maxNames {
		t.Errorf("%d names are kept", len(tree.names))
	}
}

// A cgroup has processes while one below it has. In cgroup v1 the kernel shows it elsewhere.
func TestPopulatedWithProcesses(t *testing.T) {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	v2, _, err := Mounts(f)
	if err != nil {
		t.Fatal(err)
	}
	mounts := v2[:min(1, len(v2))]
	if pids := "/sys/fs/cgroup/pids"; exists(pids + "/cgroup.procs") {
		mounts = append(mounts, pids)
	}
	if len(mounts) == 0 {
		t.Fatal("no cgroup hierarchy is mounted: mount -t cgroup2 none /sys/fs/cgroup")
	}
	for _, mount := range mounts {
		top := filepath.Join(mount, fmt.Sprintf("fairlead-test-%d", os.Getpid()))
		inner := filepath.Join(top, "inner")
		if err := os.MkdirAll(inner, 0o755); err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command("sleep", "infinity")
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
			_ = os.Remove(inner)
			_ = os.Remove(top)
		})
		if Populated(top) {
			t.Errorf("%s has processes at first", top)
		}
		if err := os.WriteFile(filepath.Join(inner, "cgroup.procs"), []byte(strconv.Itoa(cmd.Process.Pid)), 0); err != nil {
			t.Fatal(err)
		}
		if !Populated(top) || !Populated(inner) {
			t.Errorf("%s: populated %t, below it %t, want both", top, Populated(top), Populated(inner))
		}
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		for end := time.Now().Add(time.Minute); Populated(top); time.Sleep(time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("%s is populated after its process ended", top)
			}
		}
	}
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}
