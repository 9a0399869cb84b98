// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/config/rules"
	"github.com/fairlead/fairlead/internal/port"
)

// Sockets of several owners can have one address and port. A rule that denies one of them denies
// the port, and an allow list must allow each, in whatever order the agent came to know them.
func TestOwnersThatShareAPort(t *testing.T) {
	const at = "0.0.0.0:80"
	deny := func(m rules.Match) []rules.Rule { return []rules.Rule{{Match: m, Deny: true}} }
	only := func(m rules.Match) []rules.Rule { return []rules.Rule{{Match: m}, {Deny: true}} }
	name := func(s string) rules.Match { return rules.Match{Name: s} }
	containers := rules.Match{Owners: []port.OwnerKind{port.OwnerContainer}}
	a, b := socket("1f", at, "own-a"), socket("20", at, "own-b")
	unknown, bound, contained, held, relay := socket("3", at, ""), b, a, a, socket("4", at, "docker-proxy")
	unknown.Owner, unknown.Hints.Cgroup = port.Owner{}, rootCgroup
	bound.Withheld, bound.Dial = port.Because(port.Unlistened), nil
	contained.Hints.Cgroup, held.Hints.User = 50, 1000
	renamed := b
	renamed.Owner.ID = a.Owner.ID
	var workers []port.Binding
	for i := range 64 {
		w := socket(fmt.Sprintf("%x", 256+i), at, "own-a")
		w.Owner.ID = fmt.Sprint(i)
		workers = append(workers, w)
	}
	pair, abroad := []port.Binding{a, b}, []port.Binding{a, b}
	abroad[0].Owner.ID, abroad[1].Owner.ID = "", ""
	behind := []port.Binding{socket("1f", "127.0.0.1:8080", "own-a"), socket("20", "127.0.0.1:8080", "own-b")}
	redirect := nat("r", at, "127.0.0.1:8080")
	published := declared("c", at, port.OwnerContainer, "web")
	for _, c := range []struct {
		what     string
		sockets  []port.Binding
		rules    []rules.Rule
		reason   string // why it is denied, empty if it is not
		others   string // who else serves it
		rule     bool   // there is a NAT rule
		declared bool   // an engine declares the port
	}{
		{what: "both are allowed", sockets: pair, others: "own-b"},
		{what: "the first is denied", sockets: pair, rules: deny(name("own-a")), reason: "denied by rule 1", others: "own-b"},
		{what: "the second is denied", sockets: pair, rules: deny(name("own-b")), reason: "denied by rule 1: process own-b serves it, too", others: "own-b"},
		{what: "one is allowed", sockets: pair, rules: only(name("own-a")), reason: "denied by rule 2: process own-b serves it, too", others: "own-b"},
		{what: "each is allowed", sockets: pair, rules: only(name("own-*")), others: "own-b"},
		{what: "the denied one does not listen", sockets: []port.Binding{a, bound}, rules: deny(name("own-b"))},
		{what: "two of other pid namespaces", sockets: abroad, rules: deny(name("own-b")), reason: "denied by rule 1: process own-b serves it, too", others: "own-b"},
		{what: "a process that was renamed between two sockets", sockets: []port.Binding{a, renamed}, rules: deny(name("own-b")), reason: "denied by rule 1: process own-b serves it, too", others: "own-b"},
		{what: "workers of one name", sockets: workers, rules: only(name("own-a"))},
		{what: "workers, and another", sockets: append(slices.Clone(workers), b), rules: only(name("own-a")), reason: "denied by rule 2", others: "own-a"},
		{what: "one is not known", sockets: []port.Binding{a, unknown}, rules: deny(name("own-b"))},
		{what: "one is not known, one is allowed", sockets: []port.Binding{a, unknown}, rules: only(name("own-a")), reason: "denied by rule 2: an unknown process serves it, too"},
		{what: "behind a redirect", sockets: behind, rule: true, rules: deny(name("own-b")), reason: "denied by rule 1: process own-b serves it, too", others: "own-b"},
		{what: "behind a redirect, one is allowed", sockets: behind, rule: true, rules: only(name("own-a")), reason: "denied by rule 2: process own-b serves it, too", others: "own-b"},
		{what: "a container and a process", sockets: []port.Binding{contained, b}, rules: only(containers), reason: "denied by rule 2: process own-b serves it, too", others: "own-b"},
		{what: "a container and a process that is denied", sockets: []port.Binding{contained, b}, rules: deny(name("own-b")), reason: "denied by rule 1: process own-b serves it, too", others: "own-b"},
		{what: "a container and its relay", sockets: []port.Binding{relay}, declared: true, rules: only(containers)},
		{what: "a user's container, whose process is denied, and a process", sockets: []port.Binding{held, b}, rules: deny(name("own-a")), reason: "denied by rule 1", others: "own-b"},
		{what: "a user's container of a name that is allowed, and a process", sockets: []port.Binding{held, b}, rules: only(name("mine")), reason: "denied by rule 2", others: "own-b"},
	} {
		if c.rules == nil {
			c.rules = []rules.Rule{}
		}
		set, err := rules.New(rules.Loopback(), c.rules)
		if err != nil {
			t.Fatal(err)
		}
		start := func() (sockets Feed, get func() port.Publication) {
			r := New(Options{Rules: set, Logger: slog.New(slog.DiscardHandler)})
			docker := newFacts(r, "docker")
			docker.put(AttributionKey{Cgroup: 50}, "web")
			r.SetHolders(&holders{user: 1000, owner: port.Owner{Kind: port.OwnerContainer, Name: "mine", ID: "m", Held: &port.Held{Engine: "docker", User: "alice"}}})
			sockets, nats, engine := r.Feed("socket"), r.Feed("nat"), r.Feed("docker")
			if c.rule {
				nats.Replace([]port.Binding{redirect})
			}
			if engine.Replace(nil); c.declared {
				engine.Replace([]port.Binding{published})
			}
			return sockets, func() port.Publication {
				p, ok := r.Publications().View().Get(redirect.Key)
				if !ok {
					t.Fatalf("%s: not there", c.what)
				}
				return p
			}
		}
		reversed := slices.Clone(c.sockets)
		slices.Reverse(reversed)
		var first port.Publication
		for i, list := range [][]port.Binding{c.sockets, reversed} {
			events, byEvents := start()
			for j := range list {
				list[j].Since = time.Unix(int64(j), 0)
				events.Apply(put(list[j : j+1]))
			}
			dump, byDump := start()
			dump.Replace(list)
			for _, p := range []port.Publication{byEvents(), byDump()} {
				var others []string
				for _, o := range p.Others {
					if others = append(others, o.Name); o.Rival {
						t.Errorf("%s: %s is a rival", c.what, o.Name)
					}
				}
				if p.Decision.Allow != (c.reason == "") || p.Decision.Pending() || p.Decision.Reason.String() != c.reason || strings.Join(others, " ") != c.others {
					t.Errorf("%s, %d: %+v, others %q; want %q and %q", c.what, i, p.Decision, others, c.reason, c.others)
				}
				if first.Port == 0 {
					first = p
				} else if describe(p) != describe(first) || p.Decision.Rule != first.Decision.Rule {
					t.Errorf("%s: in another order %s, want %s", c.what, describe(p), describe(first))
				}
			}
		}
	}
}

// Containers in the host's network share a port for certain; what engines claim for two is not.
func TestContainersThatShareAPort(t *testing.T) {
	set, err := rules.New(rules.Loopback(), []rules.Rule{{Match: rules.Match{Name: "secret*"}, Deny: true}})
	if err != nil {
		t.Fatal(err)
	}
	for _, declare := range []bool{false, true} {
		r := New(Options{Rules: set, Logger: slog.New(slog.DiscardHandler)})
		facts := newFacts(r, "docker")
		sockets, docker := r.Feed("socket"), r.Feed("docker")
		facts.put(AttributionKey{Cgroup: 50}, "web")
		facts.put(AttributionKey{Cgroup: 51}, "secret")
		one, two := in(binding("1", "0.0.0.0:80", 7), 50), in(binding("2", "0.0.0.0:80", 8), 51)
		if docker.Replace(nil); declare {
			docker.Replace([]port.Binding{declared("c", "0.0.0.0:80", port.OwnerContainer, "web")})
		}
		sockets.Replace([]port.Binding{one, two})
		p, _ := r.Publications().View().Get(one.Key)
		if p.Decision.Allow || p.Decision.Pending() != declare || len(p.Others) != 1 || p.Others[0].Rival != declare {
			t.Errorf("declared %v: %+v, others %+v", declare, p.Decision, p.Others)
		}
	}
}
