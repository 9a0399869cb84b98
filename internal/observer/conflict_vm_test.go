// SPDX-License-Identifier: Apache-2.0

//go:build linux && vm

package observer

import "testing"

// A full kernel takes every method.
func TestRefusedPortMethods(t *testing.T) {
	for _, method := range []string{MethodFentry, MethodCgroup} {
		t.Run(method, func(t *testing.T) { refusedPorts(t, method) })
	}
}
