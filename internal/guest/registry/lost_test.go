// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"errors"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead/fairlead/internal/port"
)

// wantPort checks the state of one publication: "allow", "deny" or "pending".
func (g guarded) wantPort(t *testing.T, when, at, state string) {
	t.Helper()
	a := netip.MustParseAddrPort(at)
	d := g.publication(t, port.Key{Protocol: port.TCP, Address: a.Addr(), Port: a.Port()}).Decision
	got := "deny"
	switch {
	case d.Pending():
		got = "pending"
	case d.Allow:
		got = "allow"
	}
	if got != state {
		t.Errorf("%s: %s is %s, want %s", when, at, got, state)
	}
}

func plain(id, at string) []port.Binding {
	b := socket(id, at, "nginx")
	b.Hints.Cgroup = rootCgroup
	return []port.Binding{b}
}

// A port that is sent on to one that lost its container waits as that one does.
func TestRedirectToALostPortWaits(t *testing.T) {
	for name, to := range map[string][]string{
		"another port":          {"0.0.0.0:80", "127.0.0.1:8200"},
		"another address":       {"192.0.2.2:8200", "127.0.0.1:8200"},
		"beside another target": {"0.0.0.0:80", "127.0.0.1:8200", "172.17.0.9:80"},
	} {
		synctest.Test(t, func(t *testing.T) {
			g := newGuarded(t)
			g.docker.Replace(nil)
			g.nat.Apply(put([]port.Binding{nat("r", to[0], to[1:]...)}))
			g.sockets.Apply(put(plain("s", "0.0.0.0:8200")))
			time.Sleep(2 * ownerWait)
			g.want(t, name+", at first", "allow")
			c := []port.Binding{declared("c", "0.0.0.0:8200", port.OwnerContainer, "web")}
			g.docker.Apply(put(c))
			g.docker.Apply(drop(c))
			g.want(t, name, "pending")
			time.Sleep(2 * ownerWait)
			g.want(t, name+", later", "allow")
		})
	}
}

// What is known of an owner gets less: a Service may be named now as it might have been
// before.
func TestClaimThatEndsBeginsTheWaitAnew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGuarded(t)
		g.docker.Replace(nil)
		g.facts.put(address("10.42.0.5"), "web")
		rule := nat("r", "127.0.0.1:8200", "10.42.0.5:80")
		rule.Maker = port.MakerKubeProxy
		g.nat.Apply(put([]port.Binding{rule, nat("wide", "0.0.0.0:8200", "127.0.0.1:9")}))
		g.wantPort(t, "the rule", "127.0.0.1:8200", "pending")
		time.Sleep(2 * ownerWait)
		g.wantPort(t, "later", "127.0.0.1:8200", "allow")
		c := []port.Binding{declared("c", "127.0.0.1:8200", port.OwnerContainer, "web")}
		g.docker.Apply(put(c))
		time.Sleep(2 * ownerWait)
		g.wantPort(t, "claimed", "127.0.0.1:8200", "allow")
		g.docker.Apply(drop(c))
		g.wantPort(t, "no longer claimed", "127.0.0.1:8200", "pending")
	})
}

// The port of a deleted Service stays closed beside a container's port of the other family.
func TestDeletedServiceBesideItsContainerStaysClosed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGuarded(t)
		service := declared("s", "[::]:8200", port.OwnerService, "shop")
		g.docker.Replace([]port.Binding{service, declared("c", "0.0.0.0:8200", port.OwnerContainer, "web")})
		g.facts.own(port.Owner{Kind: port.OwnerContainer, ID: "web-id", Name: "web"}, address("fd00::3"))
		rule := nat("r", "[::]:8200", "[fd00::3]:80")
		rule.Maker = port.MakerKubeProxy
		g.nat.Apply(put([]port.Binding{rule}))
		time.Sleep(2 * ownerWait)
		g.docker.Apply(drop([]port.Binding{service}))
		g.wantPort(t, "deleted", "[::]:8200", "pending")
		time.Sleep(2 * ownerWait)
		g.wantPort(t, "later", "[::]:8200", "pending")
	})
}

// A live engine is believed before stale ones, whatever these say and in whatever order.
func TestLiveEngineDecidesBetweenStaleOnes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGuarded(t)
		containerd, cf := g.second()
		kube := newFacts(g.Registry, "kube")
		kf := g.Feed("kube")
		for _, f := range []Feed{g.docker, cf, kf} {
			f.Replace(nil)
		}
		k := address("172.17.0.2")
		g.facts.put(k, "web")
		containerd.put(k, "secret0")
		kube.put(k, "web")
		g.docker.Stale(errors.New("gone"))
		cf.Stale(errors.New("gone"))
		g.nat.Apply(put([]port.Binding{nat("r", "0.0.0.0:8200", "172.17.0.2:80")}))
		p := g.publication(t, port.Key{Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: 8200})
		if p.Owner.Name != "web" || len(p.Others) > 0 {
			t.Errorf("owner %q, others %v", p.Owner.Name, p.Others)
		}
	})
}

// A container that another engine claims a port for, and that a NAT rule of the port leads
// to, may have the port: it does not only share its fate.
func TestRivalBehindARuleOfThePort(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGuarded(t)
		_, containerd := g.second()
		g.facts.own(port.Owner{Kind: port.OwnerContainer, ID: "www-id", Name: "www"}, address("172.17.0.2"))
		g.nat.Apply(put([]port.Binding{nat("r", "0.0.0.0:8200", "172.17.0.2:80", "172.17.0.9:80")}))
		g.docker.Replace([]port.Binding{declared("c", "0.0.0.0:8200", port.OwnerContainer, "web")})
		containerd.Replace([]port.Binding{declared("d", "0.0.0.0:8200", port.OwnerContainer, "www")})
		p := g.publication(t, port.Key{Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: 8200})
		if len(p.Others) != 1 || p.Others[0].Name != "www" || !p.Others[0].Rival {
			t.Errorf("others %+v, want www as a rival", p.Others)
		}
	})
}
