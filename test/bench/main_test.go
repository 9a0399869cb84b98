// SPDX-License-Identifier: Apache-2.0

//go:build linux && (root || engines)

package main

import (
	"strings"
	"testing"

	"github.com/fairlead/fairlead/test/enclave"
)

func TestMain(m *testing.M) {
	if enclave.Dir() != "" { // the part of engines starts this program again
		main()
		return
	}
	m.Run()
}

// beyondLosses returns err without the cells that failed because a machine with
// other work made an agent lose events: no figure, and no fault of the benchmark's.
func beyondLosses(err error) error {
	if err == nil {
		return nil
	}
	for line := range strings.Lines(err.Error()) {
		if !strings.Contains(line, "the agent lost ") {
			return err
		}
	}
	return nil
}
