// SPDX-License-Identifier: Apache-2.0

package ruleset

import (
	"testing"
)

func TestDestroyedObjectsAreDeleted(t *testing.T) {
	body := append([]byte{FamilyIP, 0, 0, 0}, AppendAttr(nil, 1, []byte("nat\x00"))...)
	for typ, want := range map[uint8]uint8{26: MsgDelTable, 27: MsgDelChain, 28: MsgDelRule, 29: MsgDelSet, 30: MsgDelElem} {
		m, err := ParseMessage(typ, 0, body)
		if err != nil || m.Type != want || m.Table.Name != "nat" {
			t.Errorf("type %d: %+v, %v", typ, m, err)
		}
	}
}
