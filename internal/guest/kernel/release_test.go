// SPDX-License-Identifier: Apache-2.0

package kernel

import "testing"

func TestIsSince(t *testing.T) {
	for _, c := range []struct {
		release      string
		since, known bool
	}{
		{"6.8.0", true, true},
		{"6.8-rc1", true, true},
		{"6.18.33.2-microsoft-standard-WSL2", true, true},
		{"7.0.1", true, true},
		{"6.7.12", false, true},
		{"5.19", false, true},
		{"", false, false},
		{"6", false, false},
		{"linux-6.8", false, false},
	} {
		if since, known := isSince(c.release, 6, 8); since != c.since || known != c.known {
			t.Errorf("%q: %v, %v; want %v, %v", c.release, since, known, c.since, c.known)
		}
	}
}
