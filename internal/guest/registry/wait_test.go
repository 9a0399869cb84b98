// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead/fairlead/internal/config/rules"
	"github.com/fairlead/fairlead/internal/port"
)

// guarded is a registry that denies what belongs to "secret*", with Docker's
// facts, and the feeds of the sources.
type guarded struct {
	*Registry
	facts                *facts
	sockets, nat, docker Feed
}

func newGuarded(t *testing.T) guarded {
	t.Helper()
	g := newAsked(t)
	g.facts, g.docker = newFacts(g.Registry, "docker"), g.Feed("docker")
	return g
}

// newAsked is newGuarded without an engine.
func newAsked(t *testing.T) guarded {
	t.Helper()
	set, err := rules.New(rules.Loopback(), []rules.Rule{{Match: rules.Match{Name: "secret*"}, Deny: true}})
	if err != nil {
		t.Fatal(err)
	}
	r := New(Options{Rules: set, Logger: slog.New(slog.DiscardHandler)})
	g := guarded{Registry: r, sockets: r.Feed("socket"), nat: r.Feed("nat")}
	done := make(chan struct{})
	go func() { defer close(done); _ = r.Run(t.Context()) }()
	t.Cleanup(func() { <-done })
	return g
}

// want checks the state of each publication: "allow", "deny" or "pending".
func (g guarded) want(t *testing.T, when, state string) {
	t.Helper()
	synctest.Wait()
	if g.Publications().View().Len() == 0 && state != "" {
		t.Errorf("%s: no publications", when)
	}
	for k, p := range g.Publications().View().All() {
		got := "deny"
		switch {
		case p.Decision.Pending():
			got = "pending"
		case p.Decision.Allow:
			got = "allow"
		}
		if got != state {
			t.Errorf("%s: %s is %s (owner %q), want %s", when, k, got, p.Owner.Name, state)
		}
	}
}

// proxy returns the bindings of a published port before Docker has reported its
// container: the sockets of docker-proxy, and the NAT rule.
func proxy(id string, n int, target string) (sockets, rules []port.Binding) {
	for i, addr := range []string{"0.0.0.0", "[::]"} {
		b := in(binding(fmt.Sprint(id, i), fmt.Sprintf("%s:%d", addr, n), 100+i), 7, "/system.slice/docker.service")
		b.Owner.Name = "docker-proxy"
		sockets = append(sockets, b)
	}
	return sockets, []port.Binding{nat(id, fmt.Sprintf("0.0.0.0:%d", n), target+":80")}
}

// claim returns what Docker declares for a container.
func claim(id, name string, n int) []port.Binding {
	var out []port.Binding
	for i, addr := range []string{"0.0.0.0", "[::]"} {
		b := declared(fmt.Sprint(id, i), fmt.Sprintf("%s:%d", addr, n), port.OwnerContainer, name)
		b.Owner.ID = id
		out = append(out, b)
	}
	return out
}

func drop(bs []port.Binding) (c port.Change) {
	for _, b := range bs {
		c.Drop = append(c.Drop, b.Origin)
	}
	return c
}

func put(bs []port.Binding) port.Change { return port.Change{Put: bs} }

func address(s string) AttributionKey { return AttributionKey{Address: netip.MustParseAddr(s)} }

// start and stop are what the sources report when a container with a published
// port does, in the order of Docker.
func TestDeniedContainerNeverOpens(t *testing.T) {
	for _, name := range []string{"secret0", "web"} {
		synctest.Test(t, func(t *testing.T) {
			named := map[string]string{"secret0": "deny", "web": "allow"}[name]
			g := newGuarded(t)
			g.docker.Replace(nil)
			for range 3 {
				sockets, rules := proxy("c", 8200, "172.17.0.2")
				g.nat.Apply(put(rules))
				g.want(t, "the NAT rule", "pending")
				g.sockets.Apply(put(sockets))
				g.want(t, "docker-proxy", "pending")
				time.Sleep(900 * time.Millisecond)
				g.facts.put(address("172.17.0.2"), name)
				g.docker.Apply(put(claim("c", name, 8200)))
				g.want(t, "the start event", named)
				time.Sleep(time.Hour)
				g.want(t, "an hour later", named)
				g.facts.remove(address("172.17.0.2"))
				g.docker.Apply(drop(claim("c", name, 8200)))
				g.want(t, "the die event", "pending")
				g.nat.Apply(drop(rules))
				g.want(t, "the NAT rule gone", "pending")
				g.sockets.Apply(drop(sockets))
				g.want(t, "the end", "")
			}
			if n := len(g.waits.byKey); n != 0 {
				t.Errorf("%d waits are left", n)
			}
		})
	}
}

// What no engine can name is published at once, whatever state engines are in.
func TestPlainProcessDoesNotWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGuarded(t)
		b := in(binding("1", "0.0.0.0:8200", 9), 50, "/system.slice/nginx.service")
		g.sockets.Apply(put([]port.Binding{b}))
		g.want(t, "Docker is starting", "allow")
		g.docker.Replace(nil)
		g.want(t, "Docker is live", "allow")
		g.docker.Stale(errors.New("gone"))
		c := in(binding("2", "0.0.0.0:8201", 9), 50, "/system.slice/nginx.service")
		g.sockets.Apply(put([]port.Binding{c}))
		g.want(t, "Docker is stale", "allow")
	})
}

func TestWaitForAnOwnerEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGuarded(t)
		g.docker.Replace(nil)
		_, rules := proxy("lxc", 8200, "10.0.3.5")
		g.nat.Apply(put(rules))
		time.Sleep(ownerWait - time.Second)
		g.want(t, "nobody named it yet", "pending")
		time.Sleep(2 * time.Second)
		g.want(t, "nobody named it in time", "allow")
		g.docker.Stale(errors.New("gone"))
		g.want(t, "Docker is stale", "allow") // it was decided
		g.docker.Replace(nil)
		g.want(t, "Docker is back", "allow")
		// A container takes over the port before the old rule is gone.
		_, next := proxy("c", 8200, "172.17.0.2")
		g.nat.Apply(put(next))
		g.want(t, "another rule for the port", "pending")
		g.facts.put(address("172.17.0.2"), "secret0")
		g.want(t, "the start event", "pending") // two rules, one of an unknown owner
		time.Sleep(2 * ownerWait)
		g.want(t, "later", "deny")
		g.facts.remove(address("172.17.0.2"))
		g.want(t, "the die event", "pending")
		g.nat.Apply(drop(next))
		time.Sleep(2 * ownerWait)
		g.want(t, "the old rule is left", "allow")
	})
}

// nerdctl 1.7 leaves the NAT rule of a container that stops.
func TestRuleOfAStoppedContainerIsWithheld(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, name := range []string{"web", "secret0"} {
			named := map[string]string{"secret0": "deny", "web": "allow"}[name]
			g := newGuarded(t)
			g.docker.Replace(nil)
			_, rs := proxy("c", 8200, "10.4.0.2")
			rs[0].Maker = port.MakerCNI
			g.nat.Apply(put(rs))
			g.want(t, "the NAT rule", "pending")
			for range 2 { // stopped and started with the same address
				g.facts.put(address("10.4.0.2"), name)
				g.want(t, "the start event", named)
				g.facts.remove(address("10.4.0.2"))
				g.want(t, "the exit event", "deny")
				p, _ := g.Publications().View().Get(rs[0].Key)
				if want := "left behind by container " + name + ", stopped"; p.Decision.Reason.String() != want || !p.Decision.Withheld() {
					t.Errorf("decision %+v, want it withheld, %q", p.Decision, want)
				}
				time.Sleep(time.Hour)
				g.want(t, "an hour later", "deny")
			}
			g.nat.Apply(drop(rs))
			g.nat.Apply(put(rs))
			g.want(t, "another rule", "pending")
		}
	})
}

// What an engine that is lost had declared is withdrawn after a time; what the
// kernel shows stays.
func TestRuleOfAContainerWhoseEngineIsLostStays(t *testing.T) {
	r := New(Options{Rules: allowAll{}, Logger: slog.New(slog.DiscardHandler)})
	f := newFacts(r, "docker")
	docker, feed := r.Feed("docker"), r.Feed("nat")
	docker.Replace(nil)
	f.put(address("10.4.0.2"), "web")
	_, rs := proxy("c", 8200, "10.4.0.2")
	rs[0].Maker = port.MakerCNI
	feed.Replace(rs)
	docker.Stale(errors.New("gone"))
	f.remove(address("10.4.0.2"))
	if p, _ := r.Publications().View().Get(rs[0].Key); !p.Origins[0].Withheld.IsZero() {
		t.Errorf("withheld: %q", p.Origins[0].Withheld)
	}
}

// Only what kube-proxy left of a Service waits without end, not a container that claims
// the Service's port.
func TestContainerClaimOnServicePortNotPending(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGuarded(t)
		g.docker.Replace(nil)
		service := declared("s", "0.0.0.0:8200", port.OwnerService, "web")
		g.docker.Apply(put([]port.Binding{service, nat("r", "0.0.0.0:8200", "172.17.0.3:80")}))
		time.Sleep(2 * ownerWait)
		g.want(t, "the Service", "allow")
		g.docker.Apply(put(claim("c", "www", 8200)[:1]))
		time.Sleep(2 * ownerWait)
		g.want(t, "the container", "allow")
	})
}

// A rule of kube-proxy that is left of a Service stays closed, whatever other rules come.
func TestRuleOfADeletedServiceStaysClosed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGuarded(t)
		service := declared("s", "0.0.0.0:8200", port.OwnerService, "web")
		g.docker.Replace([]port.Binding{service})
		g.facts.put(address("10.42.0.5"), "web-0")
		left := nat("left", "0.0.0.0:8200", "10.42.0.5:80")
		left.Maker = port.MakerKubeProxy
		g.nat.Apply(put([]port.Binding{left}))
		g.docker.Apply(drop([]port.Binding{service}))
		g.want(t, "the Service is deleted", "pending")
		time.Sleep(time.Second)
		other := nat("other", "0.0.0.0:8200", "10.42.0.5:81")
		other.Maker = port.MakerKubeProxy
		g.nat.Apply(put([]port.Binding{other}))
		time.Sleep(2 * ownerWait)
		g.want(t, "another rule", "pending")
		g.docker.Apply(put([]port.Binding{service}))
		g.want(t, "the Service is back", "allow")
	})
}

// A port that its container left waits for another owner, whatever becomes of what keeps it.
func TestPortThatLostItsContainerWaits(t *testing.T) {
	searching := socket("s", "0.0.0.0:8200", "")
	searching.Owner, searching.Searching, searching.Hints.Cgroup = port.Owner{}, true, rootCgroup
	found := socket("s", "0.0.0.0:8200", "nginx")
	found.Hints.Cgroup = rootCgroup
	relay := socket("p", "0.0.0.0:8200", "docker-proxy")
	wide := socket("w", "[::]:8200", "nginx")
	wide.Owner.ID, wide.Hints.Cgroup = found.Owner.ID, rootCgroup
	for name, steps := range map[string][]port.Change{
		"its process is found":       {put([]port.Binding{searching}), {Drop: []port.Origin{{ID: "c"}}}, put([]port.Binding{found})},
		"a relay comes and goes":     {put([]port.Binding{found}), {Drop: []port.Origin{{ID: "c"}}}, put([]port.Binding{relay}), drop([]port.Binding{relay})},
		"another family beside it":   {put([]port.Binding{found, wide}), {Drop: []port.Origin{{ID: "c"}}}},
		"another family comes later": {put([]port.Binding{found}), {Drop: []port.Origin{{ID: "c"}}}, put([]port.Binding{wide})},
	} {
		synctest.Test(t, func(t *testing.T) {
			g := newGuarded(t)
			g.docker.Replace([]port.Binding{declared("c", "0.0.0.0:8200", port.OwnerContainer, "web")})
			for _, c := range steps {
				if len(c.Drop) > 0 && c.Drop[0].ID == "c" {
					g.docker.Apply(c)
				} else {
					time.Sleep(time.Second)
					g.sockets.Apply(c)
				}
			}
			g.wantPort(t, name, "0.0.0.0:8200", "pending")
			time.Sleep(2 * ownerWait)
			g.want(t, name+", later", "allow")
		})
	}
}
