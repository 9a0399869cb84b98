// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"net/netip"
	"reflect"
	"testing"

	"github.com/fairlead/fairlead/internal/port"
)

// What is kept of a binding of a NAT rule is all that it has.
func TestPublishedIsWhole(t *testing.T) {
	b := port.Binding{
		Key:    port.Key{Protocol: port.UDP, Address: netip.MustParseAddr("10.0.0.1"), Port: 53},
		Origin: port.Origin{Source: port.SourceNAT, ID: "id"}, Inner: true, Maker: port.MakerDocker, Withheld: port.Because(port.Unlistened), Rule: 1,
		Dial: []netip.AddrPort{netip.MustParseAddrPort("10.0.0.2:53")}, Doubt: "d",
		Hints: port.Hints{Targets: []netip.AddrPort{netip.MustParseAddrPort("10.0.0.3:53")}}, Detail: port.NewDetail("line"),
	}
	if got := keep([]port.Binding{b})[0].binding(b.Slot()); !reflect.DeepEqual(got, b) {
		t.Errorf("got %#v, want %#v", got, b)
	}
}
