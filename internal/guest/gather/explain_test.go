// SPDX-License-Identifier: Apache-2.0

//go:build linux

package gather

import "testing"

func TestSimilar(t *testing.T) {
	for _, tt := range []struct {
		a, b uint16
		want bool
	}{{8080, 8081, true}, {8080, 8800, true}, {8080, 8008, true}, {8080, 80, false}, {80, 81, false}, {8080, 9090, false}, {8080, 8080, false}} {
		if got := similar(tt.a, tt.b); got != tt.want {
			t.Errorf("similar(%d, %d) = %v", tt.a, tt.b, got)
		}
	}
}
