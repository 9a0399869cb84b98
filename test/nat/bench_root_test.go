// SPDX-License-Identifier: Apache-2.0

//go:build linux && (root || vm)

package nat

import (
	"fmt"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/source/nat"
)

// BenchmarkMethods compares the methods that report commits, turn by turn, because the
// machine is never quiet. Each figure of a hook is also given relative to nfnetlink's.
//
//	go run ./test/vm -kernel 6.1,6.12 -bench BenchmarkMethods ./test/nat
func BenchmarkMethods(b *testing.B) {
	for _, rules := range []int{10, 1000, 10_000} {
		b.Run(fmt.Sprintf("one change of %d rules", rules), func(b *testing.B) {
			compare(b, 20, rules, (*contender).change)
		})
	}
	b.Run("changes of other tables", func(b *testing.B) { compare(b, 3, 10, (*contender).elsewhere) })
	b.Run("refill of 2000 rules", func(b *testing.B) { compare(b, 8, 2000, (*contender).refill) })
}

// contender is a source on one method, and what it costs.
type contender struct {
	*world
	method  string
	rules   int
	conn    *nftables.Conn
	changed chan time.Time
	turns   int

	samples map[string][]float64 // by what they measure
}

// signalFeed only reports when something came; keeping the set is the registry's cost.
type signalFeed struct {
	*feed
	changed chan time.Time
}

func (f *signalFeed) Apply(port.Change) { f.changed <- time.Now() }

func newContender(b *testing.B, method string, rules int) *contender {
	w := newWorld(b)
	w.run(refill(rules, 0)+"table inet other { chain c { }; }\n", "nft", "-f", "-")
	f := &signalFeed{newFeed(), make(chan time.Time, 1024)}
	_, stop := w.startWith(nat.Options{LegacyPoll: time.Hour, Methods: []string{method}}, f)
	b.Cleanup(stop)
	eventually(b, "a first set", f.ready)
	return &contender{world: w, method: method, rules: rules, conn: w.openConn(b), changed: f.changed, samples: make(map[string][]float64)}
}

// compare lets the methods take turns, and reports medians.
func compare(b *testing.B, turns, rules int, turn func(*contender)) {
	var all []*contender
	for _, r := range methods() {
		if r.nft != nat.MethodGeneration { // its second is no measure
			all = append(all, newContender(b, r.nft, rules))
		}
	}
	time.Sleep(time.Second) // what the start left to do is no part of this
	for b.Loop() {
		for range turns {
			for _, c := range all {
				runtime.GC()
				turn(c)
				c.turns++
			}
		}
	}
	base := all[slices.IndexFunc(all, func(c *contender) bool { return c.method == nat.MethodNetlink })]
	for _, c := range all {
		for what, samples := range c.samples {
			b.ReportMetric(median(samples), c.method+"-"+what)
			if c != base {
				b.ReportMetric(median(samples)/median(base.samples[what]), c.method+"-"+what+"-ratio")
			}
		}
	}
}

func median(samples []float64) float64 {
	return slices.Sorted(slices.Values(samples))[len(samples)/2]
}

func (c *contender) add(what string, v time.Duration) {
	c.samples[what] = append(c.samples[what], float64(v.Nanoseconds())/1000)
}

// wait returns when the feed got the next change.
func (c *contender) wait() time.Time {
	select {
	case at := <-c.changed:
		return at
	case <-time.After(patience):
		c.t.Fatalf("%s: never reported", c.method)
		return time.Time{}
	}
}

// commit commits one rule and returns how long that took.
func (c *contender) commit(table *nftables.Table, chain string, exprs []expr.Any) time.Duration {
	c.conn.AddRule(&nftables.Rule{Table: table, Chain: &nftables.Chain{Name: chain, Table: table}, Exprs: exprs})
	began := time.Now()
	if err := c.conn.Flush(); err != nil {
		c.t.Fatal(err)
	}
	return time.Since(began)
}

// change measures from the return of the commit of one rule until the feed has it.
func (c *contender) change() {
	table := &nftables.Table{Name: "big", Family: nftables.TableFamilyIPv4}
	for i := range 10 {
		took := c.commit(table, "svc", dnatRule(uint16(1+c.turns*10+i)))
		done := time.Now()
		c.add("µs", max(c.wait().Sub(done), 0))
		c.add("commit-µs", took)
	}
}

// elsewhere measures what the source pays for changes that do not concern it, and what
// the program pays that makes them.
func (c *contender) elsewhere() {
	const changes = 200
	self, writer := cpuTime(unix.RUSAGE_SELF), cpuTime(unix.RUSAGE_CHILDREN)
	c.run(strings.Repeat("add rule inet other c counter\n", changes), "nft", "-i")
	time.Sleep(100 * time.Millisecond) // for what is still on its way
	c.add("cpu-µs/change", (cpuTime(unix.RUSAGE_SELF)-self)/changes)
	c.add("writer-cpu-µs/change", (cpuTime(unix.RUSAGE_CHILDREN)-writer)/changes)
	c.run("", "nft", "flush chain inet other c")
}

// refill measures a table that another program empties and refills in one commit, of
// which one rule is new: until the feed has it, and the CPU time of both.
func (c *contender) refill() {
	self, writer := cpuTime(unix.RUSAGE_SELF), cpuTime(unix.RUSAGE_CHILDREN)
	c.run(refill(c.rules, 1+c.turns), "nft", "-f", "-")
	done := time.Now()
	c.add("ms", max(c.wait().Sub(done), 0)/1000)
	c.add("cpu-ms", (cpuTime(unix.RUSAGE_SELF)-self)/1000)
	c.add("writer-cpu-ms", (cpuTime(unix.RUSAGE_CHILDREN)-writer)/1000)
}

// cpuTime is what a process, or its children that have ended, have used.
func cpuTime(who int) time.Duration {
	var u unix.Rusage
	_ = unix.Getrusage(who, &u)
	return time.Duration(unix.TimevalToNsec(u.Utime) + unix.TimevalToNsec(u.Stime))
}

func dnatRule(p uint16) []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{unix.IPPROTO_TCP}},
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: binaryutil.BigEndian.PutUint16(p)},
		&expr.Immediate{Register: 1, Data: []byte{10, 3, 0, 1}},
		&expr.NAT{Type: expr.NATTypeDestNAT, Family: unix.NFPROTO_IPV4, RegAddrMin: 1},
	}
}
