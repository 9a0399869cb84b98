// SPDX-License-Identifier: Apache-2.0

//go:build linux

package gather

import (
	"testing"

	"github.com/fairlead/fairlead/internal/guest/observer"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/status/explain"
)

// A process that has not got the socket is not said to be its owner.
func TestHolders(t *testing.T) {
	has := func(cookie uint64, pid uint32, comm string) observer.Found {
		return observer.Found{Socket: observer.Socket{Cookie: cookie, PID: pid, Comm: comm}}
	}
	nobody := has(0x1f, 0, "")
	nobody.Sought = true
	for name, c := range map[string]struct {
		sockets []observer.Found
		want    string
	}{
		"the owner":             {[]observer.Found{has(0x1f, 9, "web")}, ""},
		"the owner, by another": {[]observer.Found{has(0x1f, 9, "web"), has(0x2f, 10, "web")}, ""},
		"the owner, by one":     {[]observer.Found{has(0x2f, 10, "web"), has(0x1f, 9, "web")}, ""},
		"another process":       {[]observer.Found{has(0x1f, 10, "web")}, "pid 10 (web)"},
		"another name":          {[]observer.Found{has(0x1f, 9, "other")}, "pid 9 (other)"},
		"nobody":                {[]observer.Found{nobody}, "no process"},
		"not to be read":        {[]observer.Found{has(0x1f, 0, "")}, ""},
		"another socket":        {[]observer.Found{has(0x3f, 10, "web")}, ""},
	} {
		list := []explain.Publication{{Publication: port.Publication{
			Fact:    port.Fact{Owner: port.Owner{Kind: port.OwnerProcess, ID: "9", Name: "web"}},
			Origins: []port.OriginInfo{{Origin: port.Origin{Source: socketSource, ID: "1f/4"}}, {Origin: port.Origin{Source: socketSource, ID: "2f"}}},
		}}}
		if holders(c.sockets, list); list[0].Holder != c.want {
			t.Errorf("%s: %q, want %q", name, list[0].Holder, c.want)
		}
	}
}

func TestSimilar(t *testing.T) {
	for _, tt := range []struct {
		a, b uint16
		want bool
	}{{8080, 8081, true}, {8080, 8800, true}, {8080, 8008, true}, {8080, 80, false}, {80, 81, false}, {8080, 9090, false}, {8080, 8080, false}} {
		if got := similar(tt.a, tt.b); got != tt.want {
			t.Errorf("similar(%d, %d) = %v", tt.a, tt.b, got)
		}
	}
}
