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
	row := Publication{
		Key: key, Host: []netip.AddrPort{at}, Owner: port.Owner{Kind: port.OwnerProcess, Name: "web", ID: "811"}, Source: "socket",
	}
	var frame []byte
	encode := testing.AllocsPerRun(100, func() {
		b, err := EncodeRow(row)
		if err != nil {
			t.Fatal(err)
		}
		if frame, err = EncodeFrame(&Frame{Table: "wanted", Base: 7, Generation: 8, Put: append(append([]byte("["), b...), ']')}); err != nil {
			t.Fatal(err)
		}
	})
	decode := testing.AllocsPerRun(100, func() {
		f, err := DecodeFrame(frame[frameHeader:])
		if err != nil {
			t.Fatal(err)
		}
		if _, err := DecodeRows(f.Put, Publication.Check); err != nil {
			t.Fatal(err)
		}
	})
	// 5 and 11, and more under the race detector, which drops some of what is pooled.
	if encode > 16 || decode > 24 || len(frame) > 256 {
		t.Errorf("%d bytes, %v allocations to encode, %v to decode", len(frame), encode, decode)
	}
}
