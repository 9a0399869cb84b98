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
		pub := port.Publication{Key: port.Key{Port: 22}}
		blind, sure := p.decide(subject{port.Owner{Name: "edge-1"}, true}, pub)
		for _, zone := range []string{"a", "b"} {
			why, known := p.decide(subject{node: port.Owner{Name: "edge-1", Labels: map[string]string{"zone": zone}}}, pub)
			if !known || sure && (why == "") != (blind == "") {
				t.Errorf("%q: in zone %s %q, without labels %q", b, zone, why, blind)
			}
		}
	})
}
