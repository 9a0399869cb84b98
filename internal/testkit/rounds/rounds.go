// SPDX-License-Identifier: Apache-2.0

// Package rounds sets by the environment how often tests repeat: less in an emulator,
// more to find a rare failure.
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
