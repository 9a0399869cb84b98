// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"testing"

	"github.com/fairlead/fairlead/internal/config/yamltree"
	"github.com/fairlead/fairlead/internal/port"
)

func FuzzParse(f *testing.F) {
	f.Add([]byte("- match: {name: web, labels: {a: b}}\n  guestPorts: [8080, 9000-9010]\n  hostPorts: [53]\n"))
	f.Add([]byte("- {}\n- null\n- match: 7\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		n, err := yamltree.Parse("policy", b)
		if err != nil {
			return
		}
		var p Policy
		if new(yamltree.Decoder).Decode(n, &p, "entries") != nil {
			return
		}
		if p.Guest(port.Owner{}, 8080) || p.Host(port.Owner{}, 8080) {
			t.Errorf("%q gives ports to nobody", b)
		}
	})
}
