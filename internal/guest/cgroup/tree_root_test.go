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

// Each hierarchy that is mounted is one of ids of its own.
func TestPathOfID(t *testing.T) {
	tree, err := Open("")
	if err != nil {
		t.Fatal(err)
	}
	defer tree.Close()
	if len(tree.mounted) == 0 {
		t.Fatal("no cgroup hierarchy is mounted: mount -t cgroup2 none /sys/fs/cgroup")
	}
	for number, h := range tree.mounted {
		t.Run(h.mount, func(t *testing.T) { testPathOfID(t, tree, number, h.mount) })
	}
}

func testPathOfID(t *testing.T, tree *Tree, number uint32, mount string) {
	path := func(id uint64) []string {
		paths, ok := tree.path(V1{number, id})
		if root := id == rootID; ok != (root || len(paths) > 0) {
			t.Errorf("cgroup %d has path %q, known %t", id, paths, ok)
		}
		return paths
	}
	top := fmt.Sprintf("/fairlead-test-%d", os.Getpid())
	inside := top + "/docker-x.scope"
	if err := os.MkdirAll(filepath.Join(mount, inside), 0o755); err != nil {
		t.Fatal(err)
	}
	remove := func() {
		_ = os.Remove(filepath.Join(mount, inside))
		_ = os.Remove(filepath.Join(mount, top))
	}
	t.Cleanup(remove)
	id := func(path string) uint64 {
		fi, err := os.Stat(filepath.Join(mount, path))
		if err != nil {
			t.Fatal(err)
		}
		return fi.Sys().(*syscall.Stat_t).Ino
	}
	inner := id(inside)
	outer := id(top)
	if got := path(inner); !slices.Equal(got, []string{inside}) {
		t.Errorf("path of %d = %q, want %q", inner, got, inside)
	}
	if got := path(id("/")); got != nil {
		t.Errorf("the root has path %q", got)
	}
	remove()
	if got := path(inner); !slices.Equal(got, []string{inside}) {
		t.Errorf("a socket of a cgroup that was removed lost its path: %q", got)
	}
	for _, gone := range []uint64{outer, 1 << 60, 0} {
		if got := path(gone); got != nil {
			t.Errorf("cgroup %d, which is not there, has path %q", gone, got)
		}
	}
	for i := range uint64(3 * maxNames) {
		path(1<<50 + i)
	}
	if len(tree.names) > maxNames {
		t.Errorf("%d names are kept", len(tree.names))
	}
}

const (
	hierarchyVariable = "FAIRLEAD_TEST_HIERARCHY" // number of the one to test
	cgroupVariable    = "FAIRLEAD_TEST_CGROUP"    // directory that is the root of the namespace
	insideVariable    = "FAIRLEAD_TEST_INSIDE"    // not empty in the namespace
)

// In a cgroup namespace, paths begin at its root, and cgroups outside of it have none.
func TestPathInNamespace(t *testing.T) {
	again := func(flags uintptr, variables ...string) {
		cmd := exec.Command(os.Args[0], "-test.run=^TestPathInNamespace$")
		cmd.Env = append(os.Environ(), variables...)
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: flags}
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%v: %s", err, out)
		}
	}
	dir := os.Getenv(cgroupVariable)
	switch {
	case dir == "":
		tree, err := Open("")
		if err != nil {
			t.Fatal(err)
		}
		defer tree.Close()
		for number, h := range tree.mounted {
			if filepath.Base(h.mount) == "cpuset" {
				continue // a new one takes no processes yet
			}
			outer := filepath.Join(h.mount, fmt.Sprintf("fairlead-test-%d", os.Getpid()))
			dir := filepath.Join(outer, "a")
			if err := os.MkdirAll(dir, 0o755); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				for end := time.Now().Add(time.Minute); exists(outer) && time.Now().Before(end); time.Sleep(time.Millisecond) {
					_ = os.Remove(dir) // until its last process has gone
					_ = os.Remove(outer)
				}
			})
			again(0, cgroupVariable+"="+dir, hierarchyVariable+"="+strconv.Itoa(int(number)))
		}
	case os.Getenv(insideVariable) == "":
		if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(strconv.Itoa(os.Getpid())), 0); err != nil {
			t.Fatal(err)
		}
		again(syscall.CLONE_NEWCGROUP, insideVariable+"=1")
	default:
		tree, err := Open("")
		if err != nil {
			t.Fatal(err)
		}
		defer tree.Close()
		number, err := strconv.Atoi(os.Getenv(hierarchyVariable))
		if err != nil {
			t.Fatal(err)
		}
		inner := filepath.Join(dir, "inner")
		if err := os.Mkdir(inner, 0o755); err != nil {
			t.Fatal(err)
		}
		defer os.Remove(inner)
		for path, want := range map[string][]string{inner: {"/inner"}, dir: nil, filepath.Dir(dir): nil} {
			fi, err := os.Stat(path)
			if err != nil {
				t.Fatal(err)
			}
			got, known := tree.path(V1{uint32(number), fi.Sys().(*syscall.Stat_t).Ino})
			if !slices.Equal(got, want) || !known {
				t.Errorf("%s has path %q, known %t, want %q; %+v", path, got, known, want, tree.mounted)
			}
		}
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
