// SPDX-License-Identifier: Apache-2.0

//go:build linux && root

package bench

import (
	"fmt"
	"os/exec"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/test/kit/program"
)

// BenchmarkMemory measures the memory of agents and host peers that no file backs, when these had
// time to give back what they need no more. All of them rest at the same time.
func BenchmarkMemory(b *testing.B) {
	// A port of a host peer takes a descriptor, and some take others.
	limit := unix.Rlimit{}
	check(b, unix.Getrlimit(unix.RLIMIT_NOFILE, &limit))
	most := min(65_535, int(limit.Max)-1000)
	type row struct {
		name  string
		ports float64
		*guest
	}
	var rows []row
	add := func(name string, ports int, fill func(g *guest)) {
		g := newGuest(b)
		g.startAgent("--nat-max-ports", "10000")
		g.ready()
		open := min(ports, most)
		if open < ports {
			name += fmt.Sprint(",open=", open)
		}
		g.startHost("--max-listeners", fmt.Sprint(max(1, open)))
		fill(g)
		g.opens(open)
		rows = append(rows, row{name, float64(ports), g})
	}
	n, all := of(10_000, 100), of(65_535, 200)
	add("ports=0", 0, func(*guest) {})
	add("ports=10000", n, func(g *guest) { g.hold(firstPort, n, false) })
	add("ports=65535", all, func(g *guest) { g.hold(1, all, false) })
	add("range=10000", 10_000, (*guest).redirectRange)
	dual := linked(b) // a host peer would need two descriptors for each
	dual.hold(firstPort, n, true)
	dual.peer.settle(b, n)

	time.Sleep(of(3*time.Minute, time.Second))
	anonymous := func(p *program.Process) float64 { return float64(used(b, p).Anon) }
	agent, host := anonymous(rows[0].agent), anonymous(rows[0].host) // without ports
	for _, r := range rows {
		b.Run(r.name, func(b *testing.B) {
			a, h := anonymous(r.agent), anonymous(r.host)
			values := map[string]float64{"agent-B": a, "host-B": h}
			if r.ports > 0 {
				values["agent-added-B"], values["host-added-B"] = a-agent, h-host
				values["agent-B/port"], values["host-B/port"] = (a-agent)/r.ports, (h-host)/r.ports
			}
			metrics(b, values)
		})
	}
	b.Run("ports=10000-dual", func(b *testing.B) { metrics(b, map[string]float64{"agent-B": anonymous(dual.agent)}) })
}

// hold opens n listeners and has other processes hold them: one cannot have as many open files as
// all guests need.
func (g *guest) hold(from, n int, dual bool) {
	const each = 10_000
	for ; n > 0; from, n = from+each, n-each {
		g.fill(from, min(n, each), dual)
		g.handOver()
	}
}

// redirectRange redirects a range of 10,000 ports by one rule of the guest.
func (g *guest) redirectRange() {
	run(g.b, g.space, exec.Command("sh", "-ec", `ip link add outside type veth peer name peer
ip addr add 10.9.0.2/24 dev outside
ip link set outside up
ip link set peer up
nft 'add table ip nat; add chain ip nat pre { type nat hook prerouting priority dstnat; }
add rule ip nat pre tcp dport 20000-29999 dnat to 10.9.0.3'`))
}
