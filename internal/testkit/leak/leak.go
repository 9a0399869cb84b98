// SPDX-License-Identifier: Apache-2.0

// Package leak fails a test binary that leaves goroutines behind.
package leak

import (
	"fmt"
	"os"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/fairlead/fairlead/internal/testkit/wait"
)

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

// Find returns an error that names the goroutines that do not end, besides the
// caller's. They have more time than the half second that goleak gives them, as a busy
// machine may need it.
func Find() error {
	for end := time.Now().Add(wait.Limit()); ; {
		err := goleak.Find()
		if err == nil || time.Now().After(end) {
			return err
		}
	}
}
