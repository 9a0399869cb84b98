// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/fairlead/fairlead/internal/port"
)

// The socket of one address is preferred to that of all: no publication is dialled
// where another one answers.
func TestNoPublicationIsDialledWhereAnotherServes(t *testing.T) {
	withheld := func(b port.Binding) port.Binding {
		b.Withheld = port.Because(port.Unlistened)
		return b
	}
	device := func(id, addr string, dial ...string) port.Binding {
		b := binding(id, addr, 7)
		b.Dial = nil
		for _, d := range dial {
			b.Dial = append(b.Dial, netip.MustParseAddrPort(d))
		}
		return b
	}
	udp := func(b port.Binding) port.Binding {
		b.Protocol = port.UDP
		return b
	}
	for _, c := range []struct {
		name   string
		server port.Binding
		others []port.Binding
		want   []string
	}{
		{"loopback free", binding("1", "0.0.0.0:80", 7), []port.Binding{device("2", "10.0.0.1:80", "10.0.0.1:80")}, []string{"127.0.0.1:80"}},
		{"loopback taken", binding("1", "0.0.0.0:80", 7), []port.Binding{binding("2", "127.0.0.1:80", 8)}, []string{"127.0.0.2:80"}},
		{"by the same owner", binding("1", "0.0.0.0:80", 7), []port.Binding{binding("2", "127.0.0.1:80", 7)}, []string{"127.0.0.2:80"}},
		{"the next one as well", binding("1", "0.0.0.0:80", 7), []port.Binding{binding("2", "127.0.0.1:80", 8), device("3", "127.0.0.2:80", "127.0.0.2:80")}, []string{"127.0.0.3:80"}},
		{"only reserved", binding("1", "0.0.0.0:80", 7), []port.Binding{withheld(binding("2", "127.0.0.1:80", 8))}, []string{"127.0.0.1:80"}},
		{"UDP", udp(binding("1", "0.0.0.0:80", 7)), []port.Binding{udp(binding("2", "127.0.0.1:80", 8))}, nil},
		{"IPv6", binding("1", "[::]:80", 7), []port.Binding{binding("2", "[::1]:80", 8)}, nil},
		{"IPv6, and IPv4 of another", binding("1", "[::]:80", 7), []port.Binding{binding("2", "0.0.0.0:80", 8)}, []string{"[::1]:80"}},
		{"the IPv4 half", half(binding("1", "[::]:80", 7)), []port.Binding{binding("2", "[::1]:80", 8)}, []string{"127.0.0.1:80"}},
		{"the IPv4 half, UDP", udp(half(binding("1", "[::]:80", 7))), []port.Binding{udp(binding("2", "127.0.0.1:80", 8))}, nil},
		{"interface", device("1", "0.0.0.0:80", "10.0.0.1:80", "10.0.0.2:80"), []port.Binding{device("2", "10.0.0.1:80", "10.0.0.1:80")}, []string{"10.0.0.2:80"}},
		{"whole interface", device("1", "0.0.0.0:80", "10.0.0.1:80"), []port.Binding{device("2", "10.0.0.1:80", "10.0.0.1:80")}, nil},
		{"target of a rule", device("1", "0.0.0.0:80", "10.0.0.1:80"), []port.Binding{device("2", "10.0.0.1:80", "172.17.0.2:80")}, []string{"10.0.0.1:80"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRegistry()
			r.Feed("socket").Replace(append(slices.Clone(c.others), c.server))
			p, _ := r.Publications().View().Get(c.server.Key)
			var got []string
			for _, d := range p.Dial {
				got = append(got, d.String())
			}
			if !slices.Equal(got, c.want) {
				t.Errorf("dials %q, want %q", got, c.want)
			}
			if hidden := p.Origins[0].Withheld == port.Because(port.Hidden, c.others[0].Key.String()); hidden != (c.want == nil) {
				t.Errorf("is withheld: %q", p.Origins[0].Withheld)
			}
		})
	}
}
