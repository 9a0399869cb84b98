// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"fmt"
	"log/slog"
	"testing"

	"github.com/fairlead/fairlead/internal/port"
)

// socket returns the binding of a listener of a process.
func socket(id, addr, process string) port.Binding {
	b := binding(id, addr, 0)
	b.Owner.ID, b.Owner.Name = process+"-pid", process
	return b
}

func TestRedirectOwnerIsTheListener(t *testing.T) {
	r, f := attributed()
	rules, sockets := r.Feed("nat"), r.Feed("socket")
	const key = "tcp 0.0.0.0:80"
	rules.Replace([]port.Binding{nat("1", "0.0.0.0:80", "127.0.0.1:8080")})
	wantOwner(t, r, key, "")
	put := func(b port.Binding) { sockets.Apply(port.Change{Put: []port.Binding{b}}) }
	drop := func(id string) { sockets.Apply(port.Change{Drop: []port.Origin{{ID: id}}}) }

	put(socket("1", "0.0.0.0:8080", "web"))
	wantOwner(t, r, key, "web")
	put(socket("1", "0.0.0.0:8080", "other")) // the socket changes hands
	wantOwner(t, r, key, "other")
	put(socket("2", "127.0.0.1:8080", "exact")) // which the kernel prefers
	wantOwner(t, r, key, "exact")
	drop("2")
	wantOwner(t, r, key, "other")
	bound := socket("1", "0.0.0.0:8080", "other")
	bound.Withheld = port.Because(port.Unlistened)
	put(bound)
	wantOwner(t, r, key, "")
	drop("1")
	wantOwner(t, r, key, "")

	six := socket("3", "[::]:8080", "six")
	put(six)
	wantOwner(t, r, key, "") // IPv6 alone
	put(half(six))
	wantOwner(t, r, key, "six")
	drop("3")
	drop("3/4")
	put(socket("4", "192.0.2.2:8080", "elsewhere"))
	put(socket("5", "0.0.0.0:8081", "beside"))
	wantOwner(t, r, key, "")
	udp := socket("6", "0.0.0.0:8080", "udp")
	udp.Protocol = port.UDP
	put(udp)
	wantOwner(t, r, key, "")

	// In a container, as soon as that is known.
	put(in(socket("7", "0.0.0.0:8080", "inside"), 5))
	wantOwner(t, r, key, "inside")
	f.put(AttributionKey{Cgroup: 5}, "box")
	wantOwner(t, r, key, "box")
	nobody := binding("7", "0.0.0.0:8080", 0)
	nobody.Owner = port.Owner{}
	put(nobody)
	put(socket("8", "0.0.0.0:80", "front"))
	wantOwner(t, r, key, "front") // better known than nobody
	rules.Apply(port.Change{Put: []port.Binding{nat("1", "0.0.0.0:80", "127.0.0.1:8081")}})
	wantOwner(t, r, key, "beside")
}

func TestRedirectToSeveralOwnersHasNone(t *testing.T) {
	r, f := attributed()
	rules, sockets := r.Feed("nat"), r.Feed("socket")
	const key = "tcp 0.0.0.0:80"
	rules.Replace([]port.Binding{nat("1", "0.0.0.0:80", "127.0.0.1:8080", "127.0.0.1:8081")})
	sockets.Replace([]port.Binding{socket("1", "0.0.0.0:8080", "web"), socket("2", "127.0.0.1:8081", "web")})
	wantOwner(t, r, key, "web")
	sockets.Apply(port.Change{Put: []port.Binding{socket("2", "127.0.0.1:8081", "other")}})
	wantOwner(t, r, key, "")
	rules.Replace([]port.Binding{nat("1", "0.0.0.0:80", "127.0.0.1:8080", "10.0.0.1:80")})
	wantOwner(t, r, key, "")
	f.put(AttributionKey{Address: nat("", "0.0.0.0:1", "10.0.0.1:80").Hints.Targets[0].Addr()}, "pod")
	wantOwner(t, r, key, "") // it has half of it
}

// What NAT has sent on meets no other rule: the socket gets it, though a rule
// takes that port elsewhere for others.
func TestRedirectFollowsOneRule(t *testing.T) {
	r, f := attributed()
	rules, sockets := r.Feed("nat"), r.Feed("socket")
	f.put(AttributionKey{Address: nat("", "0.0.0.0:1", "10.0.0.1:80").Hints.Targets[0].Addr()}, "pod")
	rules.Replace([]port.Binding{
		nat("1", "0.0.0.0:80", "127.0.0.1:8080"), nat("2", "0.0.0.0:8080", "10.0.0.1:80"), nat("3", "0.0.0.0:79", "127.0.0.1:80"),
	})
	wantOwner(t, r, "tcp 0.0.0.0:80", "")
	sockets.Replace([]port.Binding{socket("1", "0.0.0.0:8080", "web")})
	wantOwner(t, r, "tcp 0.0.0.0:80", "web")
	wantOwner(t, r, "tcp 0.0.0.0:8080", "pod")
	wantOwner(t, r, "tcp 0.0.0.0:79", "")
}

// A listener that comes or goes is looked at with the rules that lead to it, not
// with all that there are.
func TestRedirectCost(t *testing.T) {
	rules := new(counting)
	r := New(Options{Rules: rules, Logger: slog.New(slog.DiscardHandler)})
	var set []port.Binding
	for i := range 10_000 {
		set = append(set, nat(fmt.Sprint(i), fmt.Sprintf("0.0.0.0:%d", 1+i), fmt.Sprintf("127.0.0.1:%d", 20_000+i)))
	}
	r.Feed("nat").Replace(set)
	sockets := r.Feed("socket")
	rules.asked = 0
	sockets.Apply(port.Change{Put: []port.Binding{socket("1", "0.0.0.0:20005", "web")}})
	sockets.Apply(port.Change{Drop: []port.Origin{{ID: "1"}}})
	if rules.asked != 3 {
		t.Errorf("rules were asked %d times, want 3: twice for the rule, once for the listener", rules.asked)
	}
}
