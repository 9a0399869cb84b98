// SPDX-License-Identifier: Apache-2.0

//go:build linux

package peer

import (
	"testing"

	"golang.org/x/sys/unix"
)

// The descriptors are numbers of the input alone: nothing closes them.
func FuzzControl(f *testing.F) {
	f.Add(unix.UnixRights(3, 4))
	f.Add(append(unix.UnixCredentials(&unix.Ucred{Pid: 1, Uid: 2, Gid: 3}), unix.UnixRights(5)...))
	f.Fuzz(func(t *testing.T, oob []byte) {
		var p Packet
		if err := p.parse(oob); len(p.FDs)*4 > len(oob) {
			t.Errorf("%d descriptors in %d bytes, %v", len(p.FDs), len(oob), err)
		}
	})
}
