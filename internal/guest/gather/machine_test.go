// SPDX-License-Identifier: Apache-2.0

//go:build linux

package gather

import (
	"testing"

	"golang.org/x/sys/unix"
)

func TestVsockIsJudgedByItsSocket(t *testing.T) {
	for _, tt := range []struct {
		err             error
		loaded, unknown bool
	}{
		{nil, true, false},
		{unix.EAFNOSUPPORT, false, false},
		{unix.EPERM, false, true},
		{unix.EACCES, false, true},
	} {
		if m := vsock(tt.err); m.Loaded != tt.loaded || (m.Error != "") != tt.unknown || m.Name != "vsock" || m.For == "" {
			t.Errorf("%v: %+v", tt.err, m)
		}
	}
}
