// SPDX-License-Identifier: Apache-2.0

//go:build linux

package hook

import (
	"testing"

	"github.com/fairlead/fairlead/internal/kernel"
	"github.com/fairlead/fairlead/internal/kernel/bpf"
)

// TestHooksExist finds the hooks of all methods in the object files.
func TestHooksExist(t *testing.T) {
	check := func(file kernel.File, hooks []string) {
		t.Helper()
		spec, err := file()
		if err != nil {
			t.Fatal(err)
		}
		for _, h := range hooks {
			if spec.Programs[h] == nil {
				t.Errorf("no program %s", h)
			}
		}
	}
	for _, method := range []string{kernel.MethodFentry, kernel.MethodKprobe} {
		file, hooks, err := programs(method)
		if err != nil {
			t.Fatal(err)
		}
		check(file, hooks)
	}
	for _, c := range legacyTables().Choices {
		check(bpf.LoadNat, c.Hooks)
	}
	if _, _, err := programs("guess"); err == nil {
		t.Error("an unknown method has hooks")
	}
}
