// SPDX-License-Identifier: Apache-2.0

// Package rounds lets the environment say how often a test does what it
// repeats: less where the processor is emulated, more to hunt a rare failure.
package rounds

import (
	"os"
	"strconv"
	"testing"
)

// Of returns the number in the environment variable name, or n without one.
// What is not a number above 0 fails the test.
func Of(tb testing.TB, name string, n int) int {
	tb.Helper()
	v := os.Getenv(name)
	if v == "" {
		return n
	}
	given, err := strconv.Atoi(v)
	if err != nil || given < 1 {
		tb.Fatalf("%s=%q: want a number above 0", name, v)
	}
	return given
}
