// SPDX-License-Identifier: Apache-2.0

//go:build !unix

package own

// Descriptors returns 0: sockets are not limited by number.
func Descriptors() uint64 { return 0 }

// Scarce is for systems that limit descriptors.
func Scarce(any, Use) bool { return false }
