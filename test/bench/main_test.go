// SPDX-License-Identifier: Apache-2.0

//go:build linux && (root || vm || engines)

package main

import (
	"os"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/test/kit/enclave"
)

func TestMain(m *testing.M) {
	// The parts of engines and flows start this program again.
	if enclave.Dir() != "" || len(os.Args) > 1 && os.Args[1] == "-relay" {
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
