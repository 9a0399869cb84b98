// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"net/netip"
	"testing"

	"github.com/fairlead/fairlead/internal/port"
)

// One publication that changes is one small message.
func TestChangeCost(t *testing.T) {
	at := netip.MustParseAddrPort("127.0.0.1:8080")
	key := port.Key{Protocol: port.TCP, Address: at.Addr(), Port: at.Port()}
	row := port.Fact{
		Key:      key,
		Owner:    port.Owner{Kind: port.OwnerProcess, Name: "web", ID: "811"},
		Source:   "socket",
		Decision: port.Decision{Allow: true, Host: []netip.AddrPort{at}},
	}
	b, err := EncodeRow(row)
	if err != nil {
		t.Fatal(err)
	}
	frame, err := EncodeFrame(&Frame{Table: "wanted", Base: 7, Generation: 8, Put: append(append([]byte("["), b...), ']')})
	if err != nil || len(frame) > 256 {
		t.Errorf("%d bytes, %v", len(frame), err)
	}
}
