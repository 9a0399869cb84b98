// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"slices"
	"testing"

	"github.com/fairlead/fairlead/internal/port"
)

func TestAtReturnsAllAddressesOfOnePort(t *testing.T) {
	r := newRegistry()
	udp := binding("u", "0.0.0.0:80", 1)
	udp.Protocol = port.UDP
	r.Feed("socket").Replace([]port.Binding{
		binding("a", "0.0.0.0:80", 1), binding("b", "[fe80::1%eth0]:80", 2), binding("c", "127.0.0.1:80", 3),
		binding("d", "127.0.0.1:79", 4), binding("e", "127.0.0.1:81", 4), udp,
	})
	var got []string
	for _, p := range r.At(port.Slot{Protocol: port.TCP, Port: 80}) {
		got = append(got, p.Key.String())
	}
	if want := []string{"tcp 0.0.0.0:80", "tcp 127.0.0.1:80", "tcp [fe80::1%eth0]:80"}; !slices.Equal(got, want) {
		t.Errorf("At = %q, want %q", got, want)
	}
}
