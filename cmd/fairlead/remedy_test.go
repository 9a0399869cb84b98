// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/config/forwards"
	"github.com/fairlead/fairlead/internal/config/rules"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/status"
	"github.com/fairlead/fairlead/internal/status/explain"
)

// changing serves the run-time rules of an agent or a host on a control socket that the
// commands use.
func changing(t *testing.T, host bool) *forwards.Store {
	t.Helper()
	dir := t.TempDir()
	l, err := status.ListenControl(filepath.Join(dir, "c"))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	log := slog.New(slog.DiscardHandler)
	store := forwards.NewStore(filepath.Join(dir, "forwards.json"), rules.Empty(rules.Loopback()), host, log, func(*rules.Set) {})
	s := status.NewServer(status.Options{Provider: guest{empty: true}, Forwards: store, Demands: func(port.Demand) port.Reason { return port.Because(port.NotServedYet) }, Logger: log})
	go func() { done <- s.Serve(ctx, l, true) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
	t.Setenv("FAIRLEAD_CLIENT_CONTROL", filepath.Join(dir, "c"))
	return store
}

// typed runs a command line of a shell in which single quotes alone are special.
func typed(t *testing.T, line string) {
	t.Helper()
	var args []string
	for i, part := range strings.Split(line, "'") {
		if i%2 == 1 {
			args = append(args, part)
		} else {
			args = append(args, strings.Fields(part)...)
		}
	}
	if out, stderr, code := execute(t, args[1:]...); code != exitOK || strings.Contains(out, "Nothing to change") {
		t.Errorf("%s: exit %d: %s%s", line, code, out, stderr)
	}
}

// lost is a port that lost an address of the host, of a guest on a host.
func lost(guest, at string, why port.Code, demands ...string) explain.Publication {
	a := netip.MustParseAddrPort(at)
	p := explain.Publication{Guest: guest, Publication: port.Publication{
		Fact:    port.Fact{Key: port.Key{Protocol: port.TCP, Address: a.Addr(), Port: a.Port()}, Owner: port.Owner{Kind: port.OwnerProcess, Name: "node", ID: "811"}},
		Origins: []port.OriginInfo{{Origin: port.Origin{Source: "socket"}}},
	}}
	p.SetNamed("", demands)
	p.Outcomes = []port.SinkOutcome{{Sink: "host", Outcome: port.Outcome{State: port.Conflict, Reason: port.Because(why)}}}
	return p
}

var inBackquotes = regexp.MustCompile("`(fairlead [^`]*)`")

// The commands that explain names are accepted, and do what it says: the port that has no host
// address gets another host port, and no other port does.
func TestRemediesWork(t *testing.T) {
	const inUse, held, rival = port.InUse, port.HeldBy, port.HeldByRival
	for _, tt := range []struct {
		name   string
		before []string // commands
		guests []string // of a host
		port   explain.Publication
		others []explain.Publication // that keep theirs
	}{
		{name: "a port near the end", port: lost("", "0.0.0.0:60000", inUse)},
		{name: "the last port", port: lost("", "0.0.0.0:65535", inUse)},
		{name: "an allowed port", before: []string{"allow 8080"}, port: lost("", "0.0.0.0:8080", inUse)},
		{name: "by name", port: lost("", "172.17.0.2:5432", held, "db:5432/tcp"),
			others: []explain.Publication{lost("", "0.0.0.0:5432", port.Unstated)}},
		{name: "by two names", port: lost("", "172.17.0.2:5432", inUse, "db:5432/tcp", "shop/db:5432/tcp")},
		{name: "one guest", guests: []string{"a"}, port: lost("a", "0.0.0.0:8080", inUse)},
		{name: "one guest, whose forward of another port has the number", guests: []string{"a"}, before: []string{"forward add 3000 --to 8080"},
			port: lost("a", "0.0.0.0:8080", held), others: []explain.Publication{lost("a", "0.0.0.0:3000", port.Unstated)}},
		{name: "one guest, whose forward by name has the number", guests: []string{"a"}, before: []string{"forward add web:80 --to 8080"},
			port: lost("a", "0.0.0.0:8080", held), others: []explain.Publication{lost("a", "172.17.0.2:80", port.Unstated, "web:80/tcp")}},
		{name: "two guests", guests: []string{"a", "vsock://3:1023"}, port: lost("vsock://3:1023", "0.0.0.0:8080", rival),
			others: []explain.Publication{lost("a", "0.0.0.0:8080", port.Unstated)}},
		{name: "two guests, by name", guests: []string{"a", "b"}, port: lost("b", "172.17.0.2:5432", inUse, "db:5432/tcp"),
			others: []explain.Publication{lost("a", "172.17.0.2:5432", port.Unstated, "db:5432/tcp"), lost("b", "0.0.0.0:5432", port.Unstated)}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			host := len(tt.guests) > 0
			commands := func(store *forwards.Store) []string {
				for _, c := range tt.before {
					typed(t, "fairlead "+c)
				}
				p := tt.port
				f := explain.Facts{Query: explain.Query{Port: p.Port}, Host: host, ForwardsFile: store.Path()}
				for _, g := range tt.guests {
					f.Sources = append(f.Sources, explain.Source{Name: g, State: "live"})
				}
				p.Apply(decision(t, store, host, p))
				at := p.Decision.Host[0]
				p.Outcomes[0].HostAddress = at
				p.Outcomes[0].Reason = port.Because(p.Outcomes[0].Reason.Code(), at.String(), "another")
				f.Publications = append([]explain.Publication{p}, tt.others...)
				var list []string
				for _, m := range inBackquotes.FindAllStringSubmatch(explain.Evaluate(f).Next, -1) {
					list = append(list, m[1])
				}
				return list
			}
			isNext := func(c string) bool { return strings.Contains(c, "--on-conflict next") }
			// With a number, and on a host with the next free one.
			store := changing(t, host)
			list := commands(store)
			if slices.ContainsFunc(list, isNext) != host || len(list) == 0 {
				t.Fatalf("commands %q", list)
			}
			before := hostPorts(t, store, host, append([]explain.Publication{tt.port}, tt.others...))
			for _, c := range list {
				if !isNext(c) {
					typed(t, c)
				}
			}
			after := hostPorts(t, store, host, append([]explain.Publication{tt.port}, tt.others...))
			if slices.Contains(before, after[0]) || !slices.Equal(before[1:], after[1:]) {
				t.Errorf("%q: host ports were %v and are %v", list, before, after)
			}
			if !host {
				return
			}
			store = changing(t, host)
			for _, c := range commands(store) {
				if isNext(c) || !strings.Contains(c, "forward add") {
					typed(t, c)
				}
			}
			if d := decision(t, store, host, tt.port); d.OnConflict != port.OnConflictNext {
				t.Errorf("%q: %+v", list, d)
			}
		})
	}
}

// A port that is denied by default is allowed by the command that explain names.
func TestAllowingWorks(t *testing.T) {
	store := changing(t, false)
	p := lost("", "0.0.0.0:5353", port.Unstated)
	p.Protocol = port.UDP
	p.Apply(decision(t, store, false, p))
	r := explain.Evaluate(explain.Facts{Query: explain.Query{Port: 5353}, ForwardsFile: store.Path(), Publications: []explain.Publication{p}})
	list := inBackquotes.FindAllStringSubmatch(r.Next, -1)
	if r.Verdict != port.VerdictWellKnown || len(list) != 1 {
		t.Fatalf("%+v", r)
	}
	typed(t, list[0][1])
	if d := decision(t, store, false, p); !d.Allow {
		t.Errorf("%+v", d)
	}
}

// decision is what the rules of the store decide about a port.
func decision(t *testing.T, store *forwards.Store, host bool, p explain.Publication) port.Ruling {
	t.Helper()
	set, err := rules.Empty(rules.Loopback()).WithRuntime(forwards.Rules(store.List()))
	if err != nil {
		t.Fatal(err)
	}
	p.Decision = port.Decision{}
	if !host {
		return set.Decide(p.Publication)
	}
	return set.Host(p.Guest, p.Publication, []netip.AddrPort{netip.AddrPortFrom(port.Loopback(p.Address), p.Port)})
}

func hostPorts(t *testing.T, store *forwards.Store, host bool, list []explain.Publication) (ports []uint16) {
	t.Helper()
	for _, p := range list {
		ports = append(ports, decision(t, store, host, p).Host[0].Port())
	}
	return ports
}
