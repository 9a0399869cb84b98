// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"bytes"
	"io"
	"net/netip"
	"testing"

	"github.com/fairlead/fairlead/internal/port"
)

// One publication that changes is one small message.
func TestChangeCost(t *testing.T) {
	at := netip.MustParseAddrPort("127.0.0.1:8080")
	key := port.Key{Protocol: port.TCP, Address: at.Addr(), Port: at.Port()}
	change := Change{Base: 7, Generation: 8, Put: []Publication{{
		Key: key, Host: []netip.AddrPort{at}, Owner: port.Owner{Kind: port.OwnerProcess, Name: "web", ID: "811"}, Source: "socket",
	}}}
	var frame bytes.Buffer
	encode := testing.AllocsPerRun(100, func() {
		frame.Reset()
		for _, part := range change.Split() {
			if err := WriteControl(&frame, part); err != nil {
				t.Fatal(err)
			}
		}
	})
	r := bytes.NewReader(nil)
	decode := testing.AllocsPerRun(100, func() {
		r.Reset(frame.Bytes())
		if _, err := ReadControl(r); err != nil && err != io.EOF {
			t.Fatal(err)
		}
	})
	// 5 and 11, and more under the race detector, which drops some of what is pooled.
	if encode > 16 || decode > 24 || frame.Len() > 256 {
		t.Errorf("%d bytes, %v allocations to encode, %v to decode", frame.Len(), encode, decode)
	}
}
