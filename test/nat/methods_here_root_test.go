// SPDX-License-Identifier: Apache-2.0

//go:build linux && root && !vm

package nat

func methods() []method { return everywhere }
