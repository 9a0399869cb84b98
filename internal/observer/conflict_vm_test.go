// SPDX-License-Identifier: Apache-2.0

//go:build linux && root && vm

package observer

import "testing"

// A full kernel takes every rung.
func TestRefusedPortRungs(t *testing.T) {
	for _, rung := range []string{RungFentry, RungCgroup} {
		t.Run(rung, func(t *testing.T) { refusedPorts(t, rung) })
	}
}
