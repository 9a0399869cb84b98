// SPDX-License-Identifier: Apache-2.0

package none

import (
	"maps"
	"net/netip"
	"slices"
	"testing"

	"github.com/fairlead/fairlead/internal/guest/reconcile"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/table"
)

func TestAllThatIsWantedIsActive(t *testing.T) {
	wanted := table.New[port.Key, port.Publication](port.Key.Compare)
	var keys []port.Key
	for n := range 3 {
		k := port.Key{Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: uint16(80 + n)}
		keys = append(keys, k)
		wanted.Update(func(tx *table.Tx[port.Key, port.Publication]) { tx.Put(k, port.Publication{Fact: port.Fact{Key: k}}) })
	}
	gone := port.Key{Protocol: port.UDP, Address: netip.IPv4Unspecified(), Port: 53}
	for _, tt := range []struct {
		change reconcile.Change
		want   []port.Key
	}{
		{reconcile.Change{}, keys},
		{reconcile.Change{Base: 1, Keys: []port.Key{keys[1], gone}}, keys[1:2]},
	} {
		out, err := Sink{}.Sync(t.Context(), wanted.View(), tt.change)
		if err != nil {
			t.Fatal(err)
		}
		if got := slices.SortedFunc(maps.Keys(out), port.Key.Compare); !slices.Equal(got, tt.want) {
			t.Errorf("%+v: outcomes of %v, want of %v", tt.change, got, tt.want)
		}
		for k, o := range out {
			if len(o) != 1 || o[0].State != port.Active || o[0].HostAddress.IsValid() {
				t.Errorf("%v: %+v", k, o)
			}
		}
	}
}
