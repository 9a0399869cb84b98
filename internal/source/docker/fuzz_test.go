// SPDX-License-Identifier: Apache-2.0

package docker

import (
	"encoding/json"
	"testing"

	"github.com/moby/moby/api/types/events"
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
	f.Add([]byte(`{"Type":"network","Action":"connect","Actor":{"ID":"n1","Attributes":{"container":"c1"}}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		var m events.Message
		if json.Unmarshal(b, &m) != nil {
			return
		}
		if ev, ok := eventOf(m); ok && ev.ID == "" {
			t.Errorf("%+v is of nobody", m)
		}
	})
}
