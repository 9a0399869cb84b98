// SPDX-License-Identifier: Apache-2.0

//go:build linux && root && vm

package nat

import (
	"testing"

	"github.com/fairlead/fairlead/internal/observer"
)

// A full kernel takes every rung.
func TestLegacyWakeRungs(t *testing.T) {
	for _, rung := range []string{observer.RungFentry, observer.RungKprobe, observer.RungTracepoint} {
		t.Run(rung, func(t *testing.T) { legacyWake(t, rung) })
	}
}
