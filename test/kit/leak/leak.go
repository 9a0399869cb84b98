// SPDX-License-Identifier: Apache-2.0

// Package leak fails a test binary that leaves goroutines behind.
package leak

import (
	"fmt"
	"os"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// patience is how long goroutines have that only wait for a processor: goleak
// itself gives them less than half a second, which a busy machine may take.
const patience = 2 * time.Minute

// Main is what a TestMain does: it runs the tests, and fails if they pass and a
// goroutine stays. It does not return.
func Main(m *testing.M) {
	code := m.Run()
	if code == 0 {
		if err := Find(); err != nil {
			fmt.Fprintln(os.Stderr, "the tests passed and left goroutines behind:", err)
			code = 1
		}
	}
	os.Exit(code)
}

// Find returns which goroutines stay for good, besides the caller's.
func Find() error {
	for end := time.Now().Add(patience); ; {
		err := goleak.Find()
		if err == nil || time.Now().After(end) {
			return err
		}
	}
}
