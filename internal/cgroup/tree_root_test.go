// SPDX-License-Identifier: Apache-2.0

//go:build linux && (root || vm)

package cgroup

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
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
