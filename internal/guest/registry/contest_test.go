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
