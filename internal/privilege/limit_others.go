// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package privilege

// Limit does nothing: only Linux has capabilities.
func Limit(_, _ Set) error { return nil }
