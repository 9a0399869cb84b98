// SPDX-License-Identifier: Apache-2.0

//go:build linux && (root || vm)

package nat

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/source/nat"
)

// BenchmarkFilter compares a source whose notifications are filtered with one that reads
// all, turn by turn, because the machine is never quiet.
//
//	go -C test test -tags root -run '^$' -bench BenchmarkFilter ./nat
func BenchmarkFilter(b *testing.B) {
	for _, rules := range []int{10, 1000, 10_000} {
		b.Run(fmt.Sprintf("one change of %d rules", rules), func(b *testing.B) {
			compare(b, 20, rules, (*contender).change)
		})
	}
	b.Run("changes of other tables", func(b *testing.B) { compare(b, 5, 10, (*contender).elsewhere) })
	b.Run("refill of 2000 rules", func(b *testing.B) { compare(b, 8, 2000, (*contender).refill) })
}

// contender is a source, and what it costs.
type contender struct {
	*world
	name    string
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

func newContender(b *testing.B, name string, rules int) *contender {
	w := newWorld(b)
	w.run(refill(rules, 0)+"table inet other { set s { type ipv4_addr; }; }\n", "nft", "-f", "-")
	f := &signalFeed{newFeed(), make(chan time.Time, 1024)}
	opt := nat.Options{LegacyPoll: time.Hour, Methods: []string{nat.MethodNetlink}}
	if name == "filtered" {
		opt.Filter = w.filter()
	}
	_, stop := w.startWith(opt, f)
	b.Cleanup(stop)
	eventually(b, "a first set", f.ready)
	return &contender{world: w, name: name, rules: rules, conn: w.openConn(b), changed: f.changed, samples: make(map[string][]float64)}
}

// compare lets both take turns, and reports medians.
func compare(b *testing.B, turns, rules int, turn func(*contender)) {
	both := []*contender{newContender(b, "filtered", rules), newContender(b, "all", rules)}
	time.Sleep(time.Second) // what the start left to do is no part of this
	for b.Loop() {
		for range turns {
			for _, c := range both {
				runtime.GC()
				turn(c)
				c.turns++
			}
		}
	}
	for what, samples := range both[0].samples {
		m, all := median(samples), median(both[1].samples[what])
		b.ReportMetric(m, "filtered-"+what)
		b.ReportMetric(all, "all-"+what)
		b.ReportMetric(m/all, "filtered/all-"+what)
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
		c.t.Fatalf("%s: never reported", c.name)
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

// elsewhere measures what the source pays while a program adds 1,000 elements a second to a
// set of another table, each in a commit of its own, beside what that program pays.
func (c *contender) elsewhere() {
	const bursts, burst = 100, 10
	c.run("", "nft", "flush set inet other s")
	time.Sleep(200 * time.Millisecond) // until that is read
	// The shell's own time counts for neither.
	lines := exec.Command("sh", "-c", fmt.Sprintf(`i=0
while [ $i -lt %d ]; do
	j=0
	while [ $j -lt %d ]; do
		echo "add element inet other s { 10.0.$i.$j }"
		j=$((j+1))
	done
	i=$((i+1))
	sleep 0.01
done`, bursts, burst))
	writer := exec.Command("ip", "netns", "exec", c.world.name, "nft", "-i")
	out, in, err := os.Pipe()
	if err != nil {
		c.t.Fatal(err)
	}
	writer.Stdin, lines.Stdout = out, in
	// Each line would wake this process if it kept the pipe.
	if err := errors.Join(lines.Start(), writer.Start(), out.Close(), in.Close()); err != nil {
		c.t.Fatal(err)
	}
	self := cpuTime(unix.RUSAGE_SELF)
	if err := errors.Join(writer.Wait(), lines.Wait()); err != nil {
		c.t.Fatal(err)
	}
	time.Sleep(100 * time.Millisecond) // for what is still on its way
	source := cpuTime(unix.RUSAGE_SELF) - self
	wrote := writer.ProcessState.UserTime() + writer.ProcessState.SystemTime()
	c.add("cpu-µs/element", source/(bursts*burst))
	c.add("writer-cpu-µs/element", wrote/(bursts*burst))
	c.samples["cpu/writer-cpu"] = append(c.samples["cpu/writer-cpu"], float64(source)/float64(wrote))
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
