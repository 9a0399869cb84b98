// SPDX-License-Identifier: Apache-2.0

package watch

import (
	"testing"

	"github.com/fairlead/fairlead/internal/guest/kernel/bpf"
)

// TestHooksExist finds the hooks of all methods in the object files.
func TestHooksExist(t *testing.T) {
	spec, err := bpf.LoadNat()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range legacyTables().Choices {
		for _, h := range c.Hooks {
			if spec.Programs[h] == nil {
				t.Errorf("no program %s", h)
			}
		}
	}
}
