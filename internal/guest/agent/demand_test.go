// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"testing"

	"github.com/fairlead/fairlead/internal/config/rules"
	"github.com/fairlead/fairlead/internal/guest/netwatch"
	"github.com/fairlead/fairlead/internal/guest/registry"
	"github.com/fairlead/fairlead/internal/guest/source/demand"
	"github.com/fairlead/fairlead/internal/guest/source/engine"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/testkit/wait"
)

// A forward by name is never decided without its rule: neither when it is added nor when it is
// removed is the port allowed at its own number.
func TestForwardByNameIsNeverWithoutItsRule(t *testing.T) {
	var engines engine.Table
	engines.Put("1", engine.Fact{
		Owner:     port.Owner{Kind: port.OwnerContainer, ID: "1", Name: "web"},
		Addresses: []netip.Addr{netip.MustParseAddr("172.17.0.2")},
	})
	log := slog.New(slog.DiscardHandler)
	source, err := demand.New(demand.Options{
		Directories: []demand.Directory{&engines}, Logger: log,
		Kind: func(netip.Addr) (netwatch.Kind, error) { return netwatch.Elsewhere, nil },
	})
	if err != nil {
		t.Fatal(err)
	}
	none := rules.Empty(rules.Loopback())
	web, err := port.ParseDemand("web:80")
	if err != nil {
		t.Fatal(err)
	}
	to, err := rules.ParseHostPort("18080")
	if err != nil {
		t.Fatal(err)
	}
	asking, err := none.WithRuntime([]rules.Rule{{
		Match: rules.Match{Protocol: web.Protocol, Ports: []rules.PortRange{{First: web.Port, Last: web.Port}}, Demand: web}, HostPort: to,
	}})
	if err != nil {
		t.Fatal(err)
	}
	a := &Agent{registry: registry.New(registry.Options{Rules: none, Logger: log}), demand: source}
	var mu sync.Mutex
	var seen []string // addresses of all generations
	sub := a.registry.Publications().SubscribeTo(func(p port.Publication) bool {
		mu.Lock()
		defer mu.Unlock()
		if at := fmt.Sprint(p.Decision.Host); !slices.Contains(seen, at) {
			seen = append(seen, at)
		}
		return true
	})
	defer sub.Close()
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	feed := a.registry.Feed(source.Name())
	running.Go(func() { _ = source.Run(ctx, feed) })
	defer func() { cancel(); running.Wait() }()
	for range 2 {
		a.applyRules(asking)
		wait.Until(t, "it is published", func() error {
			if n := a.registry.Publications().View().Len(); n != 1 {
				return fmt.Errorf("%d publications", n)
			}
			return nil
		})
		a.applyRules(none)
		if n := a.registry.Publications().View().Len(); n != 0 {
			t.Errorf("%d publications are left", n)
		}
	}
	mu.Lock()
	defer mu.Unlock()
	if want := []string{"[127.0.0.1:18080]"}; !slices.Equal(seen, want) {
		t.Errorf("it was to be at %q, want %q", seen, want)
	}
}
