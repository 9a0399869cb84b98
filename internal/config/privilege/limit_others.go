// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package privilege

// Limit does nothing: only Linux has capabilities.
func Limit(Set) error { return nil }
