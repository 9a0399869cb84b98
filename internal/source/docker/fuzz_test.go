// SPDX-License-Identifier: Apache-2.0

package docker

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/moby/moby/api/types/events"

	"github.com/fairlead/fairlead/internal/port"
)

func FuzzInspect(f *testing.F) {
	f.Add([]byte(inspection(cid(1), "web", inspected8080)))
	f.Add([]byte(inspection(cid(1), "", `"x/tcp":[{"HostPort":"70000"}],"53/udp":[{"HostIp":"127.0.0.1","HostPort":"53"}],"9/tcp":null`)))
	f.Fuzz(func(t *testing.T, b []byte) {
		var d details
		if json.Unmarshal(b, &d) != nil {
			return
		}
		for _, b := range (fetcher{}).inspected(d).Bindings {
			if b.Port == 0 || !b.Address.IsValid() || b.Address.Is4In6() {
				t.Fatalf("a binding that cannot be: %+v", b)
			}
		}
	})
}

func FuzzEvent(f *testing.F) {
	f.Add([]byte(`{"Type":"container","Action":"start","Actor":{"ID":"c1","Attributes":{"name":"web"}},"timeNano":1700000000000000000}`))
	f.Add([]byte(`{"Type":"container","Action":"died","Actor":{"ID":"c1"}}`))
	f.Add([]byte(`{"Type":"service","Action":"update","Actor":{"ID":"s1","Attributes":{"name":"web"}},"scope":"swarm"}`))
	f.Add([]byte(`{"Type":"network","Action":"connect","Actor":{"ID":"n1","Attributes":{"container":"c1"}}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		var m events.Message
		if json.Unmarshal(b, &m) != nil {
			return
		}
		for _, ev := range eventsOf(m) {
			service, is := strings.CutPrefix(ev.ID, servicePrefix)
			if ev.ID == "" || is && m.Type == events.ServiceEventType && !isServiceID(service) {
				t.Errorf("%+v is of nobody", m)
			}
		}
	})
}

func FuzzServices(f *testing.F) {
	f.Add([]byte("[" + service("s1", "web", 1, `{"Protocol":"tcp","TargetPort":80,"PublishedPort":8080,"PublishMode":"ingress"}`) + "]"))
	f.Add([]byte(`[{"ID":"s1","Endpoint":{"Ports":[{"Protocol":"sctp","PublishedPort":70000}]}},{"ID":"s2","Spec":5},{}]`))
	f.Fuzz(func(t *testing.T, b []byte) {
		objects, err := decodeServices(b)
		if err != nil && len(objects) > 0 {
			t.Fatalf("%d objects and %v", len(objects), err)
		}
		for _, o := range objects {
			if !isServiceID(strings.TrimPrefix(o.ID, servicePrefix)) {
				t.Fatalf("a service without an id: %+v", o)
			}
			for _, b := range o.Bindings {
				if b.Port == 0 || !b.Address.IsUnspecified() || b.Owner.Kind != port.OwnerService || b.Owner.Name == "" {
					t.Fatalf("a binding that cannot be: %+v", b)
				}
			}
		}
	})
}
