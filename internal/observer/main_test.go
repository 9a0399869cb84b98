// SPDX-License-Identifier: Apache-2.0

//go:build linux

package observer

import (
	"os"
	"testing"

	"go.uber.org/goleak"
)

// childVar makes the test binary play a part instead of running tests.
const childVar = "FAIRLEAD_OBSERVER_CHILD"

// children are filled by files with build tags.
var children = map[string]func(){}

func TestMain(m *testing.M) {
	if part := os.Getenv(childVar); part != "" {
		children[part]()
		return
	}
	goleak.VerifyTestMain(m)
}
