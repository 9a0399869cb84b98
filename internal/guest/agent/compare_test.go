// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"log/slog"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/fairlead/fairlead/internal/config"
	"github.com/fairlead/fairlead/internal/config/loglevel"
	"github.com/fairlead/fairlead/internal/config/rules"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/status"
)

// An agent has the rows of one that starts beside it with the same rules, and others than one with
// other rules.
func TestCompare(t *testing.T) {
	cfg := config.DefaultAgent()
	cfg.Control, cfg.ForwardsFile = filepath.Join(t.TempDir(), "s"), filepath.Join(t.TempDir(), "forwards")
	cfg.Sources, cfg.Observer, cfg.Sinks = []string{"docker"}, "poll", []config.Sink{{Name: config.NoSink}}
	a, err := New(cfg, slog.New(slog.DiscardHandler), new(loglevel.Levels))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	running.Go(func() {
		if err := a.Run(ctx, func(ctx context.Context, _ func(config.Agent, error)) { <-ctx.Done() }); err != nil {
			t.Error(err)
		}
	})
	<-a.registry.Ready()
	web, err := port.ParseDemand("web:80")
	if err != nil {
		t.Fatal(err)
	}
	asking, err := cfg.Rules.WithRuntime([]rules.Rule{{
		Match: rules.Match{Protocol: web.Protocol, Ports: []rules.PortRange{{First: web.Port, Last: web.Port}}, Demand: web},
	}})
	if err != nil {
		t.Fatal(err)
	}
	a.applyRules(asking)
	client := status.NewClient(cfg.Control)
	if c := compare(t.Context(), cfg, client, 0); c.Error != "" || c.Rows == 0 || len(c.Differences) != 1 || !strings.HasPrefix(c.Differences[0], "80/tcp web: ") {
		t.Errorf("with other rules: %+v", c)
	}
	cfg.Rules = asking
	if c := Compare(t.Context(), cfg, client); c.Error != "" || c.Rows == 0 || len(c.Differences) > 0 {
		t.Errorf("with the same rules: %+v", c)
	}
}

// What an agent that starts cannot know is not compared, and nothing else is left out.
func TestComparable(t *testing.T) {
	row := func(p port.Protocol, at string, source string) status.Publication {
		a := netip.MustParseAddrPort(at)
		return status.Publication{Fact: port.Fact{Key: port.Key{Protocol: p, Address: a.Addr(), Port: a.Port()}}, Origins: []status.Origin{{Source: source}}}
	}
	all := []status.Publication{
		row(port.TCP, "0.0.0.0:40000", "socket"), row(port.UDP, "0.0.0.0:53", "socket"), row(port.UDP, "127.0.0.1:40000", "socket"),
		row(port.UDP, "0.0.0.0:40000", "socket"), row(port.TCP, "0.0.0.0:81", "socket"), row(port.TCP, "0.0.0.0:80", "publish"),
	}
	all[4].Decision.Reason = port.Because(port.Unlistened)
	if got := knowable(status.List{Publications: slices.Clone(all)}, status.List{}).Publications; len(got) != 3 {
		t.Errorf("compared %v, want the first three", got)
	}
	if got := knowable(status.List{Publications: slices.Clone(all)}, status.List{Publications: all}).Publications; len(got) != 5 {
		t.Errorf("compared %v, want all but the last", got)
	}
}
