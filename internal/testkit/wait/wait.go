// SPDX-License-Identifier: Apache-2.0

// Package wait waits in tests for what must come.
package wait

import (
	"os"
	"testing"
	"time"
)

// Variable is the environment variable that sets Limit, as time.ParseDuration reads it.
const Variable = "FAIRLEAD_LIMIT"

const (
	limit   = 10 * time.Second
	limitCI = 2 * time.Minute // a busy machine may be ten times slower
	pause   = 10 * time.Millisecond
)

// Limit is how long a test waits for what must come before it fails: what Variable
// says, else 10 s, or 2 minutes where CI is "true".
func Limit() time.Duration {
	if d, err := time.ParseDuration(os.Getenv(Variable)); err == nil {
		return d
	}
	if os.Getenv("CI") == "true" {
		return limitCI
	}
	return limit
}

// Until calls try until it returns nil, and fails the test with what and the last
// error if that takes longer than Limit. Where there is an event to wait for, wait
// for that instead.
func Until(t testing.TB, what string, try func() error) {
	t.Helper()
	Within(t, Limit(), what, try)
}

// Within is like Until with a limit of its own.
func Within(t testing.TB, limit time.Duration, what string, try func() error) {
	t.Helper()
	for end := time.Now().Add(limit); ; time.Sleep(pause) {
		err := try()
		if err == nil {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%s: not within %v: %v", what, limit, err)
		}
	}
}

// For returns the next value of c, or fails the test if it does not come within Limit.
func For[T any](t testing.TB, what string, c <-chan T) (v T) {
	t.Helper()
	select {
	case v = <-c:
	case <-time.After(Limit()):
		t.Fatalf("%s: not within %v", what, Limit())
	}
	return v
}
