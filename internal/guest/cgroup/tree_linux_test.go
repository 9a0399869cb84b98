// SPDX-License-Identifier: Apache-2.0

package cgroup

import (
	"slices"
	"testing"
)

// The cgroup of a process in cgroup v1 counts beside that of its socket.
func TestPathsOfProcess(t *testing.T) {
	tree := &Tree{v1: true, mounted: map[uint32]hierarchy{0: {}, 4: {}}, names: map[V1]name{
		{0, 7}: {[]string{"/a"}, true}, {4, 7}: {[]string{"/b"}, true}, {4, 8}: {[]string{"/a"}, true},
		{4, 9}: {}, {4, 10}: {nil, true},
	}}
	for _, c := range []struct {
		id       uint64
		process  V1
		want     []string
		complete bool
	}{
		{7, V1{4, 7}, []string{"/a", "/b"}, true},
		{7, V1{4, 8}, []string{"/a"}, true},
		{7, V1{0, rootID}, []string{"/a"}, true},
		{7, V1{4, 9}, []string{"/a"}, false},
		{7, V1{4, 10}, []string{"/a"}, true},
		{7, V1{5, 7}, []string{"/a"}, false},
		{7, V1{}, []string{"/a"}, false},
		{rootID, V1{4, 7}, []string{"/b"}, true},
		{0, V1{4, 7}, []string{"/b"}, false},
	} {
		if got, complete := tree.Paths(c.id, c.process); !slices.Equal(got, c.want) || complete != c.complete {
			t.Errorf("socket in %d, process in %v: %q, %t, want %q, %t", c.id, c.process, got, complete, c.want, c.complete)
		}
	}
	tree.v1 = false
	if got, complete := tree.Paths(7, V1{}); !slices.Equal(got, []string{"/a"}) || !complete {
		t.Errorf("without cgroup v1: %q, %t", got, complete)
	}
}
