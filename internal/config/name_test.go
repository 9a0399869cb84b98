// SPDX-License-Identifier: Apache-2.0

package config

import (
	"strings"
	"testing"
)

func TestLongestNames(t *testing.T) {
	for n, valid := range map[int]bool{1: true, 253: true, 254: false, 1000: false} {
		name := strings.Repeat("a", n)
		if _, err := nodeName(name); (err == nil) != valid {
			t.Errorf("a Node's name of %d bytes: %v", n, err)
		}
		if _, err := ParseEndpoint("wss://" + name); (err == nil) != valid {
			t.Errorf("a server's name of %d bytes: %v", n, err)
		}
	}
}
