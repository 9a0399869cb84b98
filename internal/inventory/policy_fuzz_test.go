// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"testing"

	"github.com/fairlead/fairlead/internal/port"
)

func FuzzParsePolicy(f *testing.F) {
	f.Add([]byte("policies:\n- nodes: {name: \"edge-*\", labels: {zone: a}}\n  rules:\n  - {ports: [22], deny: true}\nrules:\n- {owner: container}\n"))
	f.Add([]byte("policies: [{nodes: {namespace: x}}]"))
	f.Fuzz(func(t *testing.T, b []byte) {
		p, err := ParsePolicy("policy", b)
		if err != nil && len(p.parts) > 0 {
			t.Errorf("%q: %v, and %d parts", b, err, len(p.parts))
		}
		_ = p.decide(port.Owner{Name: "edge-1"}, port.Publication{Key: port.Key{Port: 22}})
	})
}
