// SPDX-License-Identifier: Apache-2.0

//go:build linux && root && vm

package nat

import (
	"github.com/fairlead/fairlead/internal/observer"
	"github.com/fairlead/fairlead/internal/source/nat"
)

// A full kernel takes every method.
func methods() []method {
	return append([]method{
		{nat.MethodFentry, observer.MethodFentry},
		{nat.MethodKprobe, observer.MethodKprobe},
	}, everywhere...)
}
