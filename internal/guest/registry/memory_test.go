// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"fmt"
	"log/slog"
	"net/netip"
	"runtime"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/testkit/heap"
)

// What 20,000 ports that came and went leave is less than a tenth of what they took.
func TestMemoryOfABurstIsFreed(t *testing.T) {
	now := time.Unix(1000, 0)
	r := New(Options{Rules: allowAll{}, Logger: slog.New(slog.DiscardHandler), Now: func() time.Time { return now }})
	newFacts(r, "docker")
	feeds := map[string]Feed{"nat": r.Feed("nat"), "socket": r.Feed("socket")}
	before := heap.Used()
	const n = 20_000
	burst(feeds, n)
	full := heap.Used() - before
	for _, f := range feeds {
		var c port.Change
		for i := range n {
			c.Drop = append(c.Drop, port.Origin{ID: fmt.Sprint(i)})
		}
		f.Apply(c)
	}
	left := heap.Used() - before
	t.Logf("%d KiB with %d ports, %d KiB after them", full>>10, n, left>>10)
	if left > full/10 {
		t.Errorf("%d of %d bytes are left", left, full)
	}
	runtime.KeepAlive(r)
}

// burst reports n NAT rules and n sockets, each with an attribution of its own.
func burst(feeds map[string]Feed, n int) {
	var rules, sockets []port.Binding
	for i := range n {
		rules = append(rules, nat(fmt.Sprint(i), fmt.Sprintf("0.0.0.0:%d", 1+i), fmt.Sprintf("10.0.%d.%d:80", i>>8, i&255), fmt.Sprintf("127.0.0.1:%d", 1+i)))
		sockets = append(sockets, in(binding(fmt.Sprint(i), fmt.Sprintf("127.0.0.1:%d", 1+i), 7), uint64(2+i), fmt.Sprintf("/a.slice/%d.scope", i)))
	}
	feeds["nat"].Apply(put(rules))
	feeds["socket"].Apply(put(sockets))
}

// loopback allows each port at the loopback address.
type loopback struct{}

func (loopback) Decide(p port.Publication) port.Ruling {
	return port.Ruling{Decision: port.Decision{Allow: true, Host: []netip.AddrPort{netip.AddrPortFrom(port.Loopback(p.Address), p.Port)}}}
}

// BenchmarkMemory shows the memory of a port, with what its source gave for it.
func BenchmarkMemory(b *testing.B) {
	const n = 10_000
	number := func(i int) string { return fmt.Sprintf("0.0.0.0:%d", 1+i) }
	for _, c := range []struct {
		name    string
		binding func(i int) port.Binding
	}{
		{"OneProcess", func(i int) port.Binding { return in(binding(fmt.Sprint(i), number(i), 7), 9) }},
		{"Processes", func(i int) port.Binding { return in(binding(fmt.Sprint(i), number(i), i), uint64(9+i%10)) }},
		{"Rules", func(i int) port.Binding {
			b := nat(fmt.Sprint(i), number(i), fmt.Sprintf("10.0.%d.%d:80", i>>8, i&255))
			b.Maker = port.MakerDocker
			return b
		}},
	} {
		b.Run(c.name, func(b *testing.B) {
			var grown int64
			for b.Loop() {
				before := heap.Used()
				r := New(Options{Rules: loopback{}, Logger: slog.New(slog.DiscardHandler)})
				var set []port.Binding
				for i := range n {
					set = append(set, c.binding(i))
				}
				r.Feed("socket").Replace(set)
				grown += heap.Used() - before
				runtime.KeepAlive(r)
			}
			b.ReportMetric(float64(grown)/float64(b.N)/n, "B/port")
		})
	}
}
