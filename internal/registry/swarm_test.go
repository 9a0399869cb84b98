// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead/fairlead/internal/port"
)

// dockerd reserves the port of a Swarm service by a socket at which it serves nobody.
func TestReservedSocketOfSwarmIsNotDialled(t *testing.T) {
	sock := func(name string) port.Binding {
		b := binding("s", "[::]:8080", 7)
		b.Owner = port.Owner{Kind: port.OwnerProcess, ID: "7", Name: name}
		return b
	}
	rule := nat("r", "0.0.0.0:8080", "172.18.0.2:8080")
	rule.Maker = port.MakerSwarm
	for _, c := range []struct {
		name      string
		socket    port.Binding
		nat       bool
		dial6     string
		withheld6 port.Reason
	}{
		{"dockerd's", sock("dockerd"), true, "[[::1]:8080]", port.Because(port.ReservedBySwarm)},
		{"no service", sock("dockerd"), false, "[[::1]:8080]", port.Reason{}},
		{"another program's", sock("server"), true, "[[::1]:8080]", port.Reason{}},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRegistry()
			sockets, rules := r.Feed("socket"), r.Feed("nat")
			sockets.Replace([]port.Binding{c.socket})
			if c.nat {
				rules.Replace([]port.Binding{rule})
			}
			p, ok := r.Publications().View().Get(c.socket.Key)
			if !ok || fmt.Sprint(p.Dial) != c.dial6 || p.Origins[0].Withheld != c.withheld6 {
				t.Errorf("dials %v, withheld %q (%v), want %s, %q", p.Dial, p.Origins[0].Withheld, ok, c.dial6, c.withheld6)
			}
		})
	}

	r := newRegistry()
	sockets, rules, docker := r.Feed("socket"), r.Feed("nat"), r.Feed("docker")
	sockets.Replace([]port.Binding{sock("dockerd")})
	rules.Replace([]port.Binding{rule})
	v4, v6 := declared("d4", "0.0.0.0:8080", port.OwnerService, "web"), declared("d6", "[::]:8080", port.OwnerService, "web")
	v4.Dial, v6.Dial = rule.Dial, rule.Dial
	docker.Replace([]port.Binding{v4, v6})
	p, _ := r.Publications().View().Get(v6.Key)
	if !p.DualStack || fmt.Sprint(p.Dial) != fmt.Sprint(rule.Dial) || p.Owner.Name != "web" {
		t.Errorf("the service is %+v, want one of both families dialled at %v", p, rule.Dial)
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
