// SPDX-License-Identifier: Apache-2.0

//go:build linux && (root || vm)

package selftest

import (
	"slices"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/guest/observer"
	"github.com/fairlead/fairlead/internal/guest/source/nat"
	"github.com/fairlead/fairlead/internal/status/doctor"
)

func names(r doctor.SelfTest) (list []string) {
	for _, s := range r.Steps {
		list = append(list, s.Name)
	}
	return list
}

var (
	socketSteps = []string{"tcp open", "tcp close", "udp open", "udp close"}
	allSteps    = append(slices.Clone(socketSteps), "NAT rule add", "NAT rule remove")
)

func expect(t *testing.T, got doctor.SelfTest, want []string) {
	t.Helper()
	if got.Error != "" || !slices.Equal(names(got), want) {
		t.Errorf("steps %q, want %q; error %q", names(got), want, got.Error)
	}
	for _, s := range got.Steps {
		t.Logf("%s: %s, %d µs", s.Name, s.Method, s.Microseconds)
		if s.Error != "" || s.Method == "" {
			t.Errorf("%+v", s)
		}
	}
}

// The events of sockets and of a NAT rule arrive, and nothing is left in the namespace of
// the process.
func TestEventsArrive(t *testing.T) {
	for _, mode := range []observer.Mode{observer.Auto, observer.Poll} {
		t.Run(mode.String(), func(t *testing.T) {
			got := Run(t.Context(), Options{Sockets: &observer.Options{Mode: mode, Interval: 20 * time.Millisecond}, NAT: &nat.Options{}})
			expect(t, got, allSteps)
		})
	}
}
