// SPDX-License-Identifier: Apache-2.0

package watch

import (
	"slices"
	"testing"

	"github.com/fairlead/fairlead/internal/source/nat/ruleset"
	"github.com/fairlead/fairlead/test/kit/natrules"
)

// What a later commit deletes can no longer be asked for.
func TestResolveSkipsDeletedObjects(t *testing.T) {
	other := ruleset.TableID{Family: ruleset.FamilyIP, Name: "other"}
	msgs := []*ruleset.Message{
		{Type: ruleset.MsgNewTable, Table: other},
		{Type: ruleset.MsgNewChain, Table: natrules.Table, Chain: "a"},
		{Type: ruleset.MsgNewRule, Table: natrules.Table, Chain: "pre", Handle: 1},
		{Type: ruleset.MsgNewRule, Table: natrules.Table, Chain: "pre", Handle: 2},
		{Type: ruleset.MsgDelRule, Table: natrules.Table, Chain: "pre", Handle: 1},
		{Type: ruleset.MsgDelChain, Table: natrules.Table, Chain: "a"},
		{Type: ruleset.MsgDelTable, Table: other},
		{Type: ruleset.MsgNewTable, Table: other},
	}
	want := []bool{true, true, true, false, false, false, false, false}
	if got := doomed(msgs); !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

// The hooks of both methods are in the object files.
func TestHooksExist(t *testing.T) {
	for _, method := range []string{MethodFentry, MethodKprobe} {
		file, hooks, err := programs(method)
		if err != nil {
			t.Fatal(err)
		}
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
	if _, _, err := programs("guess"); err == nil {
		t.Error("an unknown method has hooks")
	}
}
