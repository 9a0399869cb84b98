// SPDX-License-Identifier: Apache-2.0

//go:build linux && vm

package nat

import (
	"testing"

	"github.com/fairlead/fairlead/internal/guest/kernel"
)

// A full kernel takes every method.
func TestLegacyWakeMethods(t *testing.T) {
	for _, method := range []string{kernel.MethodFentry, kernel.MethodKprobe, kernel.MethodTracepoint} {
		t.Run(method, func(t *testing.T) { legacyWake(t, method) })
	}
}
