// SPDX-License-Identifier: Apache-2.0

//go:build linux && root && vm

package nat

import (
	"github.com/fairlead/fairlead/internal/observer"
	"github.com/fairlead/fairlead/internal/source/nat"
)

// A full kernel takes every rung.
func rungs() []rung {
	return append([]rung{
		{nat.RungFentry, observer.RungFentry},
		{nat.RungKprobe, observer.RungKprobe},
	}, everywhere...)
}
