// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead/fairlead/internal/port"
)

// Engines reserve ports by sockets at which they serve nobody: a NAT rule does, maybe of
// IPv4 alone.
func TestReservedSocketIsNotDialled(t *testing.T) {
	container := "/docker/" + strings.Repeat("a", 64)
	as := func(program string, paths ...string) port.Binding {
		return in(socket("s", "[::]:8080", program), 7, paths...)
	}
	udp := as("conmon")
	udp.Protocol = port.UDP
	for _, c := range []struct {
		name      string
		socket    port.Binding
		maker     port.Maker
		none      bool // there is no rule
		withheld6 port.Reason
	}{
		{"conmon's", as("conmon"), port.MakerNetavark, false, port.Because(port.Reserved)},
		{"conmon's, in the cgroup of its container", as("conmon", container), port.MakerNetavark, false, port.Because(port.Reserved)},
		{"conmon's of UDP", udp, port.MakerNetavark, false, port.Because(port.Reserved)},
		{"conmon's, and no rule", as("conmon"), 0, true, port.Because(port.Reserved)},
		{"podman's", as("podman"), port.MakerNetavark, false, port.Because(port.Reserved)},
		{"podman's, and no rule", as("podman"), 0, true, port.Reason{}},
		{"nerdctl's", as("nerdctl"), port.MakerCNI, false, port.Because(port.Reserved)},
		{"nerdctl's sleep", as("sleep"), port.MakerCNI, false, port.Because(port.Reserved)},
		{"nerdctl's sleep, and no rule", as("sleep"), 0, true, port.Because(port.Reserved)},
		{"sleep in a container", as("sleep", container), 0, true, port.Reason{}},
		{"sleepd", as("sleepd"), port.MakerCNI, false, port.Reason{}},
		{"dockerd's", as("dockerd"), port.MakerSwarm, false, port.Because(port.Reserved)},
		{"dockerd's, and no service", as("dockerd"), 0, true, port.Reason{}},
		{"another program's", as("server"), port.MakerSwarm, false, port.Reason{}},
	} {
		t.Run(c.name, func(t *testing.T) {
			r, _ := attributed()
			sockets, rules := r.Feed("socket"), r.Feed("nat")
			sockets.Replace([]port.Binding{c.socket, half(c.socket)})
			rule := nat("r", "0.0.0.0:8080", "172.18.0.2:8080")
			rule.Maker, rule.Protocol = c.maker, c.socket.Protocol
			if !c.none {
				rules.Replace([]port.Binding{rule})
				p, _ := r.Publications().View().Get(rule.Key)
				if i := slices.IndexFunc(p.Origins, func(o port.OriginInfo) bool { return o.Source == "nat" }); fmt.Sprint(p.Dial) != "[127.0.0.1:8080]" || !p.Origins[i].Withheld.IsZero() {
					t.Errorf("the rule: %+v", p)
				}
			}
			p, ok := r.Publications().View().Get(c.socket.Key)
			if !ok || fmt.Sprint(p.Dial) != "[[::1]:8080]" || p.Origins[0].Withheld != c.withheld6 {
				t.Errorf("dials %v, withheld %q (%v), want [[::1]:8080], %q", p.Dial, p.Origins[0].Withheld, ok, c.withheld6)
			}
		})
	}

	r := newRegistry()
	sockets, rules, docker := r.Feed("socket"), r.Feed("nat"), r.Feed("docker")
	sockets.Replace([]port.Binding{as("dockerd"), half(as("dockerd"))})
	rule := nat("r", "0.0.0.0:8080", "172.18.0.2:8080")
	rule.Maker = port.MakerSwarm
	rules.Replace([]port.Binding{rule})
	v4, v6 := declared("d4", "0.0.0.0:8080", port.OwnerService, "web"), declared("d6", "[::]:8080", port.OwnerService, "web")
	v4.Dial, v6.Dial = rule.Dial, rule.Dial
	docker.Replace([]port.Binding{v4, v6})
	p, _ := r.Publications().View().Get(v6.Key)
	if fmt.Sprint(p.Dial) != fmt.Sprint(rule.Dial) || p.Owner.Name != "web" {
		t.Errorf("the service is %+v, want it dialled at %v", p, rule.Dial)
	}
}

// What an engine declares is dialled at its container where only a socket that serves nobody
// takes the connection.
func TestDeclaredPortPassesReservedSocket(t *testing.T) {
	const own, container = "[::1]:8080", "10.88.0.2:80"
	for _, c := range []struct {
		name       string
		addresses  []string // of the container
		nat, other bool
		want       string
	}{
		{"no rule", []string{container}, false, false, "[" + container + "]"},
		{"a rule", []string{container}, true, false, "[" + own + " " + container + "]"},
		{"another server", []string{container}, false, true, "[" + own + " " + container + "]"},
		{"nothing else", nil, false, false, "[" + own + "]"},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRegistry()
			sockets, rules, podman := r.Feed("socket"), r.Feed("nat"), r.Feed("podman")
			process := "conmon"
			if c.other {
				process = "server"
			}
			sockets.Replace([]port.Binding{socket("s", "[::]:8080", process)})
			if c.nat {
				rules.Replace([]port.Binding{nat("r", "[::]:8080", "[fd00::2]:80")})
			}
			b := declared("c", "[::]:8080", port.OwnerContainer, "web")
			for _, a := range c.addresses {
				b.Dial = append(b.Dial, netip.MustParseAddrPort(a))
			}
			podman.Replace([]port.Binding{b})
			if p, _ := r.Publications().View().Get(b.Key); fmt.Sprint(p.Dial) != c.want || p.Owner.Name != "web" {
				t.Errorf("%q dials %v, want %s", p.Owner.Name, p.Dial, c.want)
			}
		})
	}
}

// Rules of Swarm may be there before its services are known, and after: they name no owner.
func TestRulesOfSwarmWaitForTheirService(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGuarded(t)
		g.docker.Replace(nil)
		g.facts.put(address("172.18.0.2"), "ingress-sbox")
		rule := nat("r", "0.0.0.0:8200", "172.18.0.2:8200")
		rule.Maker = port.MakerSwarm
		g.nat.Apply(put([]port.Binding{rule}))
		g.wantPort(t, "the rule", "0.0.0.0:8200", "pending")
		service := declared("s", "0.0.0.0:8200", port.OwnerService, "shop")
		g.docker.Apply(put([]port.Binding{service}))
		g.wantPort(t, "its service", "0.0.0.0:8200", "allow")
		g.docker.Apply(drop([]port.Binding{service}))
		time.Sleep(2 * ownerWait)
		g.wantPort(t, "deleted", "0.0.0.0:8200", "pending")
	})
}
