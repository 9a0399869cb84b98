// SPDX-License-Identifier: Apache-2.0

//go:build linux && (root || vm)

package selftest

import (
	"slices"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/diagnose/doctor"
	"github.com/fairlead/fairlead/internal/observer"
	"github.com/fairlead/fairlead/internal/own"
	"github.com/fairlead/fairlead/internal/source/nat"
	"github.com/fairlead/fairlead/test/kit/netns"
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
			got := Run(t.Context(), Options{Sockets: &observer.Options{Mode: mode, Interval: 20 * time.Millisecond}, NAT: &nat.Options{}, Own: new(own.Sockets)})
			expect(t, got, allSteps)
			if got.Shared != "" {
				t.Errorf("no namespace: %s", got.Shared)
			}
		})
	}
}

// What the test opens in a namespace of its own is not taken for an address of the agent,
// to which no flow may go.
func TestAddressesOfTheTestAreNotTheAgents(t *testing.T) {
	agents := new(own.Sockets)
	test := &test{options: Options{Own: agents}}
	if err := test.open(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = test.space.Close() }()
	if test.result.Shared != "" || test.options.Own == agents {
		t.Errorf("records of the agent are used; shared: %q", test.result.Shared)
	}
}

// Without the right to make a network namespace, sockets are tested in the agent's own.
func TestWithoutNamespace(t *testing.T) {
	space, err := netns.New()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = space.Close() }()
	var got doctor.SelfTest
	if err := space.Do(func() error {
		got = Run(t.Context(), Options{Sockets: &observer.Options{}, NAT: &nat.Options{}, Own: new(own.Sockets), NoSpaces: true})
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	expect(t, got, socketSteps)
	if got.Shared == "" {
		t.Error("no reason")
	}
}

// A test that is to be apart opens nothing in the agent's own namespace.
func TestApartOrNotAtAll(t *testing.T) {
	got := Run(t.Context(), Options{Sockets: &observer.Options{}, Own: new(own.Sockets), NoSpaces: true, Apart: true})
	if got.Error == "" || len(got.Steps) > 0 {
		t.Errorf("%+v", got)
	}
}
