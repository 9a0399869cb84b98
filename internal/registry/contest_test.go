// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/rules"
)

// second adds containerd to a guarded registry.
func (g *guarded) second() (*facts, Feed) {
	f := newFacts(g.Registry, "containerd")
	return f, g.Feed("containerd")
}

func (g guarded) publication(t *testing.T, key port.Key) port.Publication {
	t.Helper()
	synctest.Wait()
	p, ok := g.Publications().View().Get(key)
	if !ok {
		t.Fatalf("no publication %s", key)
	}
	return p
}

// The port behind a redirect passes from one relay to another: the second may serve a
// denied container.
func TestOwnerBehindARedirectChanges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGuarded(t)
		g.docker.Replace(nil)
		relay := func(id string) []port.Binding {
			b := in(binding(id, "0.0.0.0:8080", 9), 7, "/system.slice/docker.service")
			b.Owner.Name, b.Owner.ID = "docker-proxy", id
			return []port.Binding{b}
		}
		g.nat.Apply(put([]port.Binding{nat("r", "0.0.0.0:80", "127.0.0.1:8080")}))
		g.sockets.Apply(put(relay("1")))
		g.want(t, "the first relay", "pending")
		time.Sleep(2 * ownerWait)
		g.want(t, "nobody named its container", "allow")
		g.sockets.Apply(drop(relay("1")))
		g.sockets.Apply(put(relay("2")))
		g.want(t, "the second relay", "pending")
		g.sockets.Apply(drop(relay("2")))
		g.want(t, "nobody listens", "pending")
		time.Sleep(2 * ownerWait)
		g.sockets.Apply(put(relay("3")))
		g.want(t, "the third relay", "pending")
	})
}

func TestClaimsOfTwoEngines(t *testing.T) {
	for _, byFact := range []bool{false, true} {
		for _, first := range []string{"web", "secret0"} {
			synctest.Test(t, func(t *testing.T) {
				g := newGuarded(t)
				facts, containerd := g.second()
				other := map[string]string{"web": "secret0", "secret0": "web"}[first]
				state := map[string]string{"web": "allow", "secret0": "deny"}
				c1, c2 := claim("a", first, 8200)[:1], claim("b", other, 8200)[:1]
				if byFact {
					c1, c2 = nil, nil
					_, rs := proxy("r", 8200, "172.17.0.2")
					g.nat.Replace(rs)
					g.facts.put(address("172.17.0.2"), first)
					facts.put(address("172.17.0.2"), other)
				}
				g.docker.Replace(c1)
				containerd.Replace(c2)
				g.want(t, "both are live", "pending")
				p := g.publication(t, port.Key{Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: 8200})
				want := fmt.Sprintf("owner not certain: claimed for container %s and container %s", first, other)
				if p.Decision.Reason.String() != want {
					t.Errorf("reason %q, want %q", p.Decision.Reason, want)
				}
				time.Sleep(time.Hour)
				g.want(t, "an hour later", "pending")
				g.docker.Stale(errors.New("gone"))
				if !byFact { // a NAT rule that appeared before is not provisional
					g.want(t, "the first is stale", state[other])
				}
				g.docker.Replace(c1)
				g.want(t, "the first is back", "pending")
				containerd.Stale(errors.New("gone"))
				g.want(t, "the second is stale", state[first])
				g.docker.Stale(errors.New("gone"))
				g.want(t, "both are stale", "pending")
			})
		}
	}
}

// Claims for owners about whom the rules decide alike need no arbiter.
func TestClaimsThatNoRuleTellsApart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGuarded(t)
		_, containerd := g.second()
		g.docker.Replace(claim("a", "web", 8200))
		containerd.Replace(claim("b", "www", 8200))
		g.want(t, "both are allowed", "allow")
		containerd.Replace(claim("b", "secret0", 8200))
		g.docker.Replace(claim("a", "secret1", 8200))
		g.want(t, "both are denied", "deny")
	})
}

// A port that an allowed container claims leads to a denied one by a NAT rule.
func TestNATRuleToDeniedContainerDenied(t *testing.T) {
	for name, rule := range map[string]port.Binding{
		"address":     nat("r", "0.0.0.0:8200", "172.17.0.3:80"),
		"one of two":  nat("r", "0.0.0.0:8200", "172.17.0.2:80", "172.17.0.3:80"),
		"redirect":    nat("r", "0.0.0.0:8200", "127.0.0.1:9000"),
		"half of one": nat("r", "0.0.0.0:8200", "10.0.0.9:80", "172.17.0.3:80"),
		"mixed":       nat("r", "0.0.0.0:8200", "127.0.0.1:9000", "10.0.0.9:80"),
	} {
		for _, claimed := range []bool{false, true} {
			synctest.Test(t, func(t *testing.T) {
				g := newGuarded(t)
				g.facts.put(address("172.17.0.2"), "web")
				g.facts.put(address("172.17.0.3"), "secret0")
				g.facts.put(AttributionKey{Path: id1}, "secret0")
				if g.docker.Replace(nil); claimed {
					g.docker.Replace(claim("a", "web", 8200)[:1])
				}
				g.sockets.Apply(put([]port.Binding{in(binding("s", "0.0.0.0:9000", 9), 50, "/docker/"+id1)}))
				g.nat.Apply(put([]port.Binding{rule}))
				time.Sleep(time.Hour)
				synctest.Wait()
				if p := g.publication(t, rule.Key); p.Decision.Allow || claimed && p.Owner.Name != "web" {
					t.Errorf("%s, claimed %v: %+v, owner %q", name, claimed, p.Decision, p.Owner.Name)
				}
				g.nat.Apply(drop([]port.Binding{rule}))
				g.sockets.Apply(drop([]port.Binding{binding("s", "0.0.0.0:9000", 9)}))
				if claimed {
					g.want(t, name+": without the rule", "allow")
				}
			})
		}
	}
}

// An engine may name who is behind a rule later than it names the owner of the port.
func TestUnknownTargetIsPending(t *testing.T) {
	for _, owner := range []port.Binding{
		declared("c", "0.0.0.0:8200", port.OwnerContainer, "web"), declared("c", "0.0.0.0:8200", port.OwnerService, "web"),
		in(binding("c", "0.0.0.0:8200", 9), 50, "/docker/"+id1),
	} {
		for _, targets := range [][]string{{"172.17.0.3:80"}, {"172.17.0.2:80", "172.17.0.3:80"}, {"172.17.0.2:80", "127.0.0.1:9000", "172.17.0.3:80"}} {
			synctest.Test(t, func(t *testing.T) {
				g := newGuarded(t)
				g.facts.put(address("172.17.0.2"), "web")
				g.facts.put(AttributionKey{Path: id1}, "web")
				front := declared("front", "127.0.0.1:9000", port.OwnerContainer, "web")
				g.docker.Replace([]port.Binding{front})
				g.sockets.Apply(put([]port.Binding{socket("9000", "127.0.0.1:9000", "front")}))
				g.sockets.Apply(put([]port.Binding{owner}))
				g.want(t, "the owner", "allow")
				rule := nat("r", "0.0.0.0:8200", targets...)
				wants := func(when, state string) {
					t.Helper()
					p := g.publication(t, rule.Key)
					if d := p.Decision; d.Pending() != (state == "pending") || d.Allow != (state == "allow") {
						t.Errorf("%+v, %v: %s: %+v, want %s", owner.Owner, targets, when, d, state)
					}
				}
				g.nat.Apply(put([]port.Binding{rule}))
				wants("the rule", "pending")
				time.Sleep(time.Second)
				g.facts.put(address("172.17.0.3"), "secret0")
				wants("the start event", "deny")
				g.facts.put(address("172.17.0.3"), "www")
				wants("another one", "allow")
				g.nat.Apply(drop([]port.Binding{rule}))
				g.facts.remove(address("172.17.0.3"))
				g.nat.Apply(put([]port.Binding{rule}))
				wants("a rule to something that no engine knows", "pending")
				time.Sleep(2 * ownerWait)
				wants("nobody named it in time", "allow")
			})
		}
	}
}

// A start in the usual order is not delayed by its NAT rule.
func TestKnownTargetsNotPending(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGuarded(t)
		g.facts.put(address("172.17.0.2"), "web-0")
		g.facts.put(address("172.17.0.3"), "web-1")
		g.docker.Replace(claim("c", "web", 8200)[:1])
		g.nat.Apply(put([]port.Binding{nat("r", "0.0.0.0:8200", "172.17.0.2:80", "172.17.0.3:80")}))
		g.want(t, "the rule", "allow")
	})
}

// What the agent dials of a port may meet a NAT rule under another address of it.
func TestRuleOfAnotherAddressDivertsTheDial(t *testing.T) {
	for _, c := range []struct {
		socket, rule string
		diverts      bool
	}{
		{"0.0.0.0:8200", "127.0.0.1:8200", true},
		{"127.0.0.1:8200", "0.0.0.0:8200", true},
		{"192.0.2.2:8200", "0.0.0.0:8200", true},
		{"[::]:8200", "[::1]:8200", true},
		{"[::1]:8200", "[::]:8200", true},
		{"192.0.2.2:8200", "127.0.0.1:8200", false},
		{"127.0.0.1:8200", "192.0.2.2:8200", false},
		{"127.0.0.1:8200", "[::]:8200", false},
		{"127.0.0.1:8201", "0.0.0.0:8200", false},
	} {
		for _, inside := range []bool{false, true} { // an allowed container of the host's network
			for _, first := range []string{"socket", "rule"} {
				synctest.Test(t, func(t *testing.T) {
					g := newGuarded(t)
					g.docker.Replace(nil)
					g.facts.put(AttributionKey{Path: id1}, "web")
					b := socket("s", c.socket, "nginx")
					b.Dial = []netip.AddrPort{netip.AddrPortFrom(b.Address, b.Port)}
					if b.Address.IsUnspecified() {
						b.Dial[0] = netip.AddrPortFrom(port.Loopback(b.Address), b.Port)
					}
					if b = in(b, 50, "/system.slice/nginx.service"); inside {
						b = in(b, 50, "/docker/"+id1)
					}
					rule := nat("r", c.rule, "172.17.0.3:80")
					steps := []func(){func() { g.sockets.Apply(put([]port.Binding{b})) }, func() { g.nat.Apply(put([]port.Binding{rule})) }}
					if first == "rule" {
						slices.Reverse(steps)
					}
					for _, f := range steps {
						f()
					}
					wants := func(when, state string) {
						t.Helper()
						if !c.diverts {
							state = "allow"
						}
						p := g.publication(t, b.Key)
						if d := p.Decision; d.Pending() != (state == "pending") || d.Allow != (state == "allow") {
							t.Errorf("%s and a rule for %s, %s first, container %v: %s: %+v, want %s", c.socket, c.rule, first, inside, when, d, state)
						}
					}
					wants("the target is not known", "pending")
					g.facts.put(address("172.17.0.3"), "secret0")
					wants("it is a denied container", "deny")
					g.facts.put(address("172.17.0.3"), "www")
					wants("it is an allowed container", "allow")
					g.facts.put(address("172.17.0.3"), "secret0")
					g.nat.Apply(drop([]port.Binding{rule}))
					wants("the rule is gone", "allow")
				})
			}
		}
	}
}

// A stale fact names a rule that appeared before, not one that appears beside it.
func TestSecondRuleToAnAddressOfAStaleEngine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGuarded(t)
		g.docker.Replace(nil)
		g.facts.put(address("172.17.0.2"), "web")
		_, old := proxy("old", 8200, "172.17.0.2")
		_, other := proxy("new", 8201, "172.17.0.2")
		g.nat.Apply(put(old))
		g.docker.Stale(errors.New("gone"))
		g.nat.Apply(put(other))
		if p := g.publication(t, old[0].Key); !p.Decision.Allow {
			t.Errorf("the old rule: %+v", p.Decision)
		}
		if p := g.publication(t, other[0].Key); !p.Decision.Pending() {
			t.Errorf("the new rule: %+v", p.Decision)
		}
		old[0].Detail = port.NewDetail("another comment")
		g.nat.Apply(put(old))
		if p := g.publication(t, old[0].Key); !p.Decision.Allow {
			t.Errorf("the old rule, described anew: %+v", p.Decision)
		}
		g.docker.Replace(nil)
		g.want(t, "Docker is back", "allow")
	})
}

func TestRulesReloadKeepsWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGuarded(t)
		set := g.rules
		g.SetRules(rules.Empty(rules.Loopback()))
		g.docker.Replace(nil)
		_, rs := proxy("lxc", 8200, "10.0.3.5")
		g.nat.Apply(put(rs))
		g.want(t, "no rule names an owner", "allow")
		time.Sleep(time.Hour)
		g.SetRules(set)
		if p, _ := g.Publications().View().Get(rs[0].Key); !p.Decision.Allow {
			t.Errorf("the rules are loaded: %+v", p.Decision)
		}
		_, rs = proxy("lxc2", 8201, "10.0.3.6")
		g.nat.Apply(put(rs))
		time.Sleep(ownerWait - time.Second)
		g.SetRules(set)
		time.Sleep(2 * time.Second)
		g.want(t, "10 seconds after the rule", "allow")
	})
}

// Programs that have ports of their own do not wait for a container.
func TestOnlyRelaysWait(t *testing.T) {
	for name, want := range map[string]string{
		"k3s-server": "allow", "kubelet": "allow", "rke2": "allow", "nerdctl-helper2": "pending", "passtime": "allow",
		"docker-proxy": "pending", "docker-proxyish": "allow", "pasta.avx2": "pending", "rootlesskit-doc": "pending", "conmon": "deny",
		"sleep": "deny",
	} {
		synctest.Test(t, func(t *testing.T) {
			g := newGuarded(t)
			b := in(binding("1", "0.0.0.0:6443", 9), 50, "/system.slice/x.service")
			b.Owner.Name = name
			g.sockets.Apply(put([]port.Binding{b}))
			g.want(t, name, want)
		})
	}
}

// A deny rule may name a process that is still being searched for, whatever cgroup it
// is in, with and without engines.
func TestUnknownProcessWaits(t *testing.T) {
	set, err := rules.New(rules.Loopback(), []rules.Rule{{Match: rules.Match{Name: "secret*"}, Deny: true}})
	if err != nil {
		t.Fatal(err)
	}
	for _, group := range []uint64{0, rootCgroup, 50} {
		for _, engines := range []bool{false, true} {
			synctest.Test(t, func(t *testing.T) {
				r := New(Options{Rules: set, Logger: slog.New(slog.DiscardHandler)})
				g := guarded{Registry: r}
				if engines {
					g.facts = newFacts(r, "docker")
				}
				g.sockets = r.Feed("socket")
				if engines {
					r.Feed("docker").Replace(nil)
				}
				done := make(chan struct{})
				go func() { defer close(done); _ = r.Run(t.Context()) }()
				t.Cleanup(func() { <-done })
				b := in(binding("1", "0.0.0.0:8200", 0), group, "/system.slice/x.service")
				b.Owner, b.Searching = port.Owner{}, true
				g.sockets.Apply(put([]port.Binding{b}))
				g.want(t, "not known yet", "pending")
				time.Sleep(2 * ownerWait)
				g.want(t, "a search that does not end", "allow")
				g.sockets.Apply(drop([]port.Binding{b}))
				g.sockets.Apply(put([]port.Binding{b}))
				g.want(t, "another socket", "pending")
				if b.Searching = false; !engines || group == rootCgroup {
					g.sockets.Apply(put([]port.Binding{b}))
					g.want(t, "not found", "allow")
				}
				b.Owner = port.Owner{Kind: port.OwnerProcess, ID: "7", Name: "secretd"}
				g.sockets.Apply(put([]port.Binding{b}))
				g.want(t, "found", "deny")
			})
		}
	}
}

// A container whose id its user chose is in a cgroup of that name.
func TestContainerWithAChosenIDWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGuarded(t)
		g.docker.Replace(nil)
		b := in(binding("1", "0.0.0.0:8200", 9), 50, "/default/redis")
		g.sockets.Apply(put([]port.Binding{b}))
		g.want(t, "listen", "pending")
		g.facts.put(AttributionKey{Cgroup: 50}, "secret0")
		g.want(t, "the start event", "deny")
	})
}

// One engine knows the labels of a pod, the other only its address, and forgets it later.
func TestLabelsStayUntilTheEnd(t *testing.T) {
	set, err := rules.New(rules.Loopback(), []rules.Rule{{Match: rules.Match{Labels: map[string]string{"zone": "internal"}}, Deny: true}})
	if err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		r := New(Options{Rules: set, Logger: slog.New(slog.DiscardHandler)})
		cri, kube := newFacts(r, "containerd"), newFacts(r, "kube")
		nats := r.Feed("nat")
		g := guarded{Registry: r}
		containerd := r.Feed("containerd")
		containerd.Replace(nil)
		r.Feed("kube").Replace(nil)
		pod := port.Owner{Kind: port.OwnerContainer, ID: "shop/web-0", Name: "web-0", Namespace: "shop"}
		sandbox := pod
		sandbox.ID, sandbox.Labels = "5e", map[string]string{"zone": "internal"}
		k := address("10.42.0.5")
		cri.own(sandbox, k)
		kube.own(pod, k)
		_, rs := proxy("r", 8200, "10.42.0.5")
		nats.Apply(put(rs))
		g.want(t, "both know it", "deny")
		containerd.Stale(errors.New("gone"))
		g.want(t, "the one with the labels is stale", "deny")
		containerd.Replace(nil)
		cri.remove(k)
		g.want(t, "the one without labels knows it", "deny")
		kube.remove(k)
		g.want(t, "nobody knows it", "pending")
		nats.Apply(drop(rs))
		kube.own(pod, k)
		nats.Apply(put(rs))
		g.want(t, "the next pod of that name has no labels", "allow")
	})
}

// kube-proxy removes the rules of a Service after the Service.
func TestRulesOfADeletedServiceStayClosed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGuarded(t)
		g.facts.put(address("10.42.0.5"), "web-0")
		service := declared("s", "0.0.0.0:30080", port.OwnerService, "secret")
		g.docker.Replace([]port.Binding{service})
		rule := nat("r", "0.0.0.0:30080", "10.42.0.5:80")
		rule.Maker = port.MakerKubeProxy
		g.nat.Apply(put([]port.Binding{rule}))
		g.want(t, "the Service", "deny")
		g.docker.Apply(drop([]port.Binding{service}))
		g.want(t, "deleted", "pending")
		time.Sleep(time.Hour)
		g.want(t, "an hour later", "pending")
		g.docker.Apply(put([]port.Binding{service}))
		g.want(t, "made again", "deny")
	})
}

// An agent that starts after a container stopped learns that from the engine.
func TestRuleLeftBehindBeforeTheAgentStarted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, first := range []string{"rule", "engine"} {
			g := newGuarded(t)
			_, rs := proxy("c", 8200, "10.4.0.2")
			rs[0].Maker = port.MakerCNI
			k := address("10.4.0.2")
			g.facts.gone = map[netip.Addr]port.Owner{k.Address: {Kind: port.OwnerContainer, ID: "n1", Name: "n1"}}
			if first == "rule" {
				g.nat.Apply(put(rs))
				g.want(t, "Docker is starting", "pending")
			}
			g.facts.notify([]AttributionKey{k})
			g.docker.Replace(nil)
			if first == "engine" {
				g.nat.Apply(put(rs))
			}
			g.want(t, first, "deny")
			if p := g.publication(t, rs[0].Key); p.Decision.Reason.String() != "left behind by container n1, stopped" {
				t.Errorf("%s: %+v", first, p.Decision)
			}
			delete(g.facts.gone, k.Address)
			g.facts.put(k, "n1")
			g.want(t, "started", "allow")
		}
	})
}

// A stale claim is of the container that was there before.
func TestStaleClaimDoesNotNameWhatAppearsBesideIt(t *testing.T) {
	for _, what := range []string{"relay", "rule"} {
		synctest.Test(t, func(t *testing.T) {
			g := newGuarded(t)
			sockets, rs := proxy("old", 8200, "172.17.0.2")
			g.sockets.Apply(put(sockets))
			g.nat.Apply(put(rs))
			g.facts.put(address("172.17.0.2"), "web")
			g.docker.Replace(claim("a", "web", 8200))
			g.want(t, "web", "allow")
			g.docker.Stale(errors.New("gone"))
			g.want(t, "Docker is stale", "allow")
			sockets2, rs2 := proxy("new", 8200, "172.17.0.3")
			if what == "relay" {
				g.sockets.Apply(drop(sockets))
				g.sockets.Apply(put(sockets2))
			} else {
				g.nat.Apply(drop(rs))
				g.nat.Apply(put(rs2))
			}
			g.wantPort(t, "another "+what, "0.0.0.0:8200", "pending")
			wantIPv6 := "pending"
			if what == "rule" { // which is of IPv4
				wantIPv6 = "allow"
			}
			g.wantPort(t, "another "+what, "[::]:8200", wantIPv6)
			g.facts.remove(address("172.17.0.2"))
			g.facts.put(address("172.17.0.3"), "secret0")
			g.docker.Replace(claim("b", "secret0", 8200))
			g.want(t, "Docker is back", "deny")
		})
	}
}

// modelEngine is an engine of the model: what it would report, and whether it can.
type modelEngine struct {
	facts  *facts
	feed   Feed
	stale  bool
	claims []port.Binding
	later  []func() // facts to report when it is back
}

func (e *modelEngine) report(f func(), claims []port.Binding) {
	e.claims = claims
	if e.stale {
		e.later = append(e.later, f)
		return
	}
	f()
	e.feed.Replace(claims)
}

func (e *modelEngine) lose() { e.stale = true; e.feed.Stale(errors.New("gone")) }

func (e *modelEngine) back() {
	e.stale = false
	for _, f := range e.later {
		f()
	}
	e.later = nil
	e.feed.Replace(e.claims)
}

// Two engines that come and go, and containers in each of the ways in which one has a
// port: none that is denied is ever open.
func TestDeniedContainersOfTwoEnginesModel(t *testing.T) {
	for seed := range uint64(300) {
		synctest.Test(t, func(t *testing.T) { deniedByTwo(t, rand.New(rand.NewPCG(seed, 4))) })
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
}

func deniedByTwo(t *testing.T, rng *rand.Rand) {
	g := newGuarded(t)
	f, feed := g.second()
	engines := []*modelEngine{{facts: g.facts, feed: g.docker}, {facts: f, feed: feed}}
	for _, e := range engines {
		e.feed.Replace(nil)
	}
	for round := range 30 {
		name, id := []string{"secret0", "web"}[rng.IntN(2)], fmt.Sprint("c", round)
		ip := fmt.Sprint("172.17.0.", 2+rng.IntN(2))
		e := engines[rng.IntN(2)]
		sockets, rs := proxy(id, 8200, ip)
		key, claims := address(ip), claim(id, name, 8200)
		switch rng.IntN(4) {
		case 0: // in the host's network
			cid := fmt.Sprintf("%064x", round)
			sockets = []port.Binding{in(binding(id, "0.0.0.0:8200", 9), uint64(100+round), "/docker/"+cid)}
			rs, claims, key = nil, nil, AttributionKey{Path: cid}
		case 1: // the same, with a chosen id
			sockets = []port.Binding{in(binding(id, "0.0.0.0:8200", 9), uint64(100+round), "/default/"+id)}
			rs, claims, key = nil, nil, AttributionKey{Cgroup: uint64(100 + round)}
		case 2: // behind a redirect to its relay
			b := in(binding(id, "127.0.0.1:9000", 9), 7, "/system.slice/docker.service")
			b.Owner.Name = "docker-proxy"
			sockets, rs = []port.Binding{b}, []port.Binding{nat(id, "0.0.0.0:8200", "127.0.0.1:9000")}
			claims = []port.Binding{declared(id, "127.0.0.1:9000", port.OwnerContainer, name)}
			claims[0].Owner.ID = id
		}
		up := []func(){func() { g.sockets.Apply(put(sockets)) }, func() { g.nat.Apply(put(rs)) }}
		rng.Shuffle(len(up), func(i, j int) { up[i], up[j] = up[j], up[i] })
		down := []func(){
			func() { g.sockets.Apply(drop(sockets)) }, func() { g.nat.Apply(drop(rs)) },
			func() { e.report(func() { e.facts.remove(key) }, nil) },
		}
		rng.Shuffle(len(down), func(i, j int) { down[i], down[j] = down[j], down[i] })
		steps := append(up, func() { e.report(func() { e.facts.put(key, name) }, claims) })
		steps = append(steps, down...)
		for i, step := range steps {
			for _, e := range engines {
				switch {
				case e.stale && rng.IntN(3) == 0:
					e.back()
				case !e.stale && rng.IntN(10) == 0:
					e.lose()
				}
			}
			step()
			synctest.Wait()
			for k, p := range g.Publications().View().All() {
				if name == "secret0" && p.Decision.Allow && serves(p) {
					t.Errorf("round %d, step %d: %s is open, owner %+v, others %+v", round, i, k, p.Owner, p.Others)
					return
				}
			}
			time.Sleep(time.Duration(rng.IntN(3000)) * time.Millisecond)
		}
	}
}

// serves reports whether the kernel has something that makes the port reachable.
func serves(p port.Publication) bool {
	for _, o := range p.Origins {
		if o.Source == "socket" || o.Source == "nat" {
			return true
		}
	}
	return false
}
