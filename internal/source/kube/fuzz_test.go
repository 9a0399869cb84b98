// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"encoding/json"
	"testing"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/source/kube/object"
)

// A Service and an EndpointSlice of any API server: what they declare has an address and a
// port, and one origin each.
func FuzzService(f *testing.F) {
	f.Add([]byte(`{"metadata":{"namespace":"default","name":"web","labels":{"app":"web"}},"spec":{"type":"NodePort","clusterIP":"10.96.0.9","ipFamilies":["IPv4","IPv6"],"ports":[{"name":"http","port":80,"nodePort":30080,"targetPort":8080}]}}`),
		[]byte(`{"metadata":{"name":"web-1","labels":{"kubernetes.io/service-name":"web"}},"addressType":"IPv4","ports":[{"name":"http","port":8080}],"endpoints":[{"addresses":["10.42.0.5"],"conditions":{"ready":true},"targetRef":{"kind":"Pod","namespace":"default","name":"web-0"}}]}`))
	f.Add([]byte(`{"spec":{"type":"LoadBalancer","externalIPs":["192.0.2.7","::ffff:1.2.3.4","x"],"loadBalancerSourceRanges":["10.0.0.0/8"],"ports":[{"protocol":"SCTP","port":1},{"port":0},{"port":70000}]},"status":{"loadBalancer":{"ingress":[{"ip":"192.0.2.8"},{"hostname":"h"}]}}}`), []byte(`{}`))
	f.Fuzz(func(t *testing.T, b, sliceJSON []byte) {
		var o object.Service
		var slice object.EndpointSlice
		if json.Unmarshal(b, &o) != nil || json.Unmarshal(sliceJSON, &slice) != nil {
			return
		}
		bindings, _ := compact(&o).declare([]endpoints{compactSlice(&slice)}, true)
		seen := map[port.Origin]bool{}
		for _, b := range bindings {
			if !b.Address.IsValid() || b.Address.Is4In6() || b.Port == 0 || seen[b.Origin] {
				t.Errorf("%+v", b)
			}
			for _, d := range b.Dial {
				if !d.IsValid() || d.Port() == 0 {
					t.Errorf("%s is dialled at %s", b.Key, d)
				}
			}
			seen[b.Origin] = true
		}
	})
}
