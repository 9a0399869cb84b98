// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"errors"
	"testing"
)

// Trampolines are kept from processes that may end with their PID namespace, on kernels that hang
// then.
func TestHang(t *testing.T) {
	const other = 4026532001
	for _, c := range []struct {
		release   string
		pid       int
		namespace uint64
		want      error
	}{
		{"5.15.167.4-microsoft-standard-WSL2", 300, other, ErrHang},
		{"6.1.0-56-cloud-amd64", 2, other, ErrHang},
		{"6.6.87.2-microsoft-standard-WSL2", 2, other, ErrHang},
		{"6.1.0-56-cloud-amd64", 1, other, nil},
		{"6.1.0-56-cloud-amd64", 300, initialPIDNamespace, nil},
		{"6.1.0-56-cloud-amd64", 300, 0, nil},
		{"6.9.0", 300, other, nil},
		{"6.12.117", 300, other, nil},
		{"7.2.13+deb14-cloud-amd64", 300, other, nil},
		{"unknown", 300, other, nil},
	} {
		if err := hang(c.release, c.pid, c.namespace); !errors.Is(err, c.want) {
			t.Errorf("%s, process %d of %d: %v, want %v", c.release, c.pid, c.namespace, err, c.want)
		}
	}
}
