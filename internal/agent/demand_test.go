// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead/fairlead/internal/config"
	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/netwatch"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/registry"
	"github.com/fairlead/fairlead/internal/rules"
	"github.com/fairlead/fairlead/internal/sink/hostlink"
	"github.com/fairlead/fairlead/internal/source/demand"
	"github.com/fairlead/fairlead/internal/source/engine"
	"github.com/fairlead/fairlead/test/kit/wait"
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

// What a host asks for no more is withdrawn at once, also while the source rests.
func TestForwardOfTheHostIsWithdrawnAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var engines engine.Table
		engines.Put("1", engine.Fact{
			Owner:     port.Owner{Kind: port.OwnerContainer, ID: "1", Name: "web"},
			Addresses: []netip.Addr{netip.MustParseAddr("172.17.0.2")},
		})
		log := slog.New(slog.DiscardHandler)
		source, err := demand.New(demand.Options{
			Directories: []demand.Directory{&engines}, Logger: log,
			Kind: func(netip.Addr) (netwatch.Kind, error) {
				time.Sleep(100 * time.Millisecond)
				return netwatch.Elsewhere, nil
			},
		})
		if err != nil {
			t.Fatal(err)
		}
		a := &Agent{
			cfg: config.Agent{HostForwards: true}, demand: source,
			registry: registry.New(registry.Options{Rules: rules.Empty(rules.Loopback()), Logger: log}),
		}
		var h hostlink.Options
		a.takeDemands(&h, new(link.Options))
		ctx, cancel := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() { _ = source.Run(ctx, a.registry.Feed(source.Name())) })
		defer func() { cancel(); running.Wait() }()
		web, err := port.ParseDemand("web:80")
		if err != nil {
			t.Fatal(err)
		}
		h.Demand([]port.Demand{web})
		time.Sleep(time.Second) // the look takes 100 ms, and the source rests for 4.9 s
		if n := a.registry.Publications().View().Len(); n != 1 {
			t.Fatalf("%d publications, want 1", n)
		}
		h.Demand(nil)
		if n := a.registry.Publications().View().Len(); n != 0 {
			t.Errorf("%d publications are left", n)
		}
	})
}

// A host asks for nothing unless the configuration lets it, and is told of what waits in the
// guest if it is told of other unpublished ports.
func TestHostForwards(t *testing.T) {
	parse := func(s string) []port.Demand {
		d, err := port.ParseDemand(s)
		if err != nil {
			t.Fatal(err)
		}
		return []port.Demand{d}
	}
	for name, c := range map[string]struct {
		asks, reports bool
		want          string
	}{
		"neither": {false, false, ""}, "asks": {true, false, "host:80/tcp"}, "is told": {false, true, "guest:80/tcp"},
		"both": {true, true, "guest:80/tcp host:80/tcp"},
	} {
		source, err := demand.New(demand.Options{Logger: slog.New(slog.DiscardHandler), Kind: netwatch.Classify})
		if err != nil {
			t.Fatal(err)
		}
		a := &Agent{cfg: config.Agent{HostForwards: c.asks, ReportUnpublished: c.reports}, demand: source}
		var h hostlink.Options
		var l link.Options
		a.takeDemands(&h, &l)
		if l.Demand != c.asks || (h.Demand != nil) != c.asks || (h.Demands != nil) != (c.want != "") {
			t.Errorf("%s: hello %t, taken %t, told %t", name, l.Demand, h.Demand != nil, h.Demands != nil)
		}
		source.Ask(askedByRules, parse("guest:80"))
		if c.asks {
			h.Demand(parse("host:80"))
		}
		var told []string
		if h.Demands != nil {
			for _, w := range h.Demands() {
				told = append(told, w.Port)
				if w.Reason == "" || w.Reason != a.demands("", parse(w.Port)[0]) {
					t.Errorf("%s: %+v", name, w)
				}
			}
		}
		if got := strings.Join(told, " "); got != c.want {
			t.Errorf("%s: told of %q, want %q", name, got, c.want)
		}
	}
}
