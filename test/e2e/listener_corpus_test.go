// SPDX-License-Identifier: Apache-2.0

//go:build linux && root

package e2e

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/testkit/wait"
	"github.com/fairlead/fairlead/test/kit/echo"
	"github.com/fairlead/fairlead/test/nat/corpus"
)

// Not for the emulated kernels: an agent starts slowly there, and
// TestTrafficThroughEachRuleset covers how the kernel treats the rulesets.
//
// Every TCP port that is only a rule, of whatever tool, is reachable through WSL's
// relay, which by itself shows none of them. A rule of the output hook may leave
// 127.0.0.0/8 out, as Docker's does, or take it, or take ::1, from where packets
// cannot be sent on: the placeholder gets the connection all the same.
func TestRelayShowsRuleOnlyPorts(t *testing.T) {
	cases, err := corpus.Cases()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range cases {
		t.Run(c.Name, func(t *testing.T) {
			t.Parallel() // most of the time is spent waiting
			relayCorpus(t, c)
		})
	}
}

func relayCorpus(t *testing.T, c corpus.Case) {
	lines := slices.DeleteFunc(liveLines(t, c), func(l live) bool { return l.network != "tcp" })
	var addresses []netip.Addr
	var servers []netip.AddrPort
	for _, l := range lines {
		for _, a := range l.targets {
			if !slices.Contains(servers, a) {
				servers = append(servers, a)
			}
			if !a.Addr().IsLoopback() && !slices.Contains(addresses, a.Addr()) {
				addresses = append(addresses, a.Addr())
			}
		}
	}
	r := newRig(t, "--sink", "listener", "--listener-settle", "100ms", "--source", "socket,nat")
	b := backends(t, r.guest, addresses)
	for _, a := range servers {
		where := b
		if a.Addr().IsLoopback() { // what REDIRECT leads to, on whatever address
			where, a = r.guest, netip.AddrPortFrom(wildcard(a.Addr()), a.Port())
		}
		go echo.Serve(where.listen(t, "tcp"+family(a.Addr()), a.String()))
	}
	for _, s := range c.Sections {
		r.guest.feed(t, s.Text, s.Command...)
	}
	r.startListening()
	const placeholder = 10 * time.Second // until one is opened for a rule of Docker
	for _, l := range lines {
		wait.Within(t, placeholder+wait.Limit(), l.key+" answers at "+l.host, func() error {
			conn, err := r.outside.Dial("tcp", l.host)
			if err != nil {
				return err
			}
			defer conn.Close()
			return roundTrip(conn, l.key)
		})
	}
	l, err := r.list()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range l.Publications {
		for _, o := range p.Origins {
			if o.Source == "socket" && strings.Contains(o.Detail, "fairlead") {
				t.Errorf("a socket of our own is published: %s", fmt.Sprint(p.Key))
			}
		}
	}
}

func TestPlaceholderAfterRestart(t *testing.T) {
	r, pod := listenerRig(t)
	go answer(pod.listen(t, "tcp4", "0.0.0.0:80"), "pod")
	r.guest.sh(t, ruleTo8081)
	for range 3 {
		r.wantState("tcp 0.0.0.0:8081", "active")
		r.throughRelay("127.0.0.1:8081", "pod got hello\n")
		r.agent.Kill() // connections that are left over at the port do not matter
		r.startAgent()
	}
	r.wantState("tcp 0.0.0.0:8081", "active")
	r.throughRelay("127.0.0.1:8081", "pod got hello\n")
}
