// SPDX-License-Identifier: Apache-2.0

//go:build linux && (root || vm)

package nat

import (
	"fmt"
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

// signalFeed only reports when something came; keeping the set is the registry's cost.
type signalFeed struct {
	*feed
	changed chan time.Time
}

func (f *signalFeed) Apply(port.Change) {
	f.changed <- time.Now()
}

// BenchmarkCommit measures from the return of the commit of one rule until the
// feed has it, on each method that hears of it and at several sizes of the table,
// and the CPU time of the process for each change, the commit's included.
func BenchmarkCommit(b *testing.B) {
	for _, n := range []int{10, 1000, 10_000} { // methods side by side: the machine is never quiet
		for _, r := range methods() {
			if r.nft == nat.MethodGeneration {
				continue // its second is no measure
			}
			b.Run(fmt.Sprintf("%s/%d", r.nft, n), func(b *testing.B) { benchmarkCommit(b, r.nft, n) })
		}
	}
}

func benchmarkCommit(b *testing.B, method string, n int) {
	w := newWorld(b)
	w.run(refill(n, 0), "nft", "-f", "-")
	conn := w.openConn(b)
	f := &signalFeed{newFeed(), make(chan time.Time, 64)}
	_, stop := w.startWith(nat.Options{LegacyPoll: time.Hour, Methods: []string{method}}, f)
	defer stop()
	eventually(b, "a first set", f.ready)
	time.Sleep(time.Second) // what the start left to do is no part of this
	for len(f.changed) > 0 {
		<-f.changed
	}
	table := &nftables.Table{Name: "big", Family: nftables.TableFamilyIPv4}
	chain := &nftables.Chain{Name: "svc", Table: table}
	var waits, commits []time.Duration
	before := cpuTime(unix.RUSAGE_SELF)
	for i := 0; b.Loop() && i < 8000; i++ {
		conn.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: dnatRule(uint16(1 + i%9000))})
		began := time.Now()
		if err := conn.Flush(); err != nil {
			b.Fatal(err)
		}
		done := time.Now()
		commits = append(commits, done.Sub(began))
		select {
		case at := <-f.changed:
			waits = append(waits, max(at.Sub(done), 0))
		case <-time.After(patience):
			b.Fatal("never reported")
		}
	}
	used := cpuTime(unix.RUSAGE_SELF) - before
	slices.Sort(waits)
	slices.Sort(commits)
	b.ReportMetric(float64(waits[len(waits)/2].Microseconds()), "µs-p50")
	b.ReportMetric(float64(waits[len(waits)*99/100].Microseconds()), "µs-p99")
	b.ReportMetric(float64(commits[len(commits)/2].Microseconds()), "commit-µs-p50")
	b.ReportMetric(float64(used.Microseconds())/float64(len(waits)), "cpu-µs/change")
}

// BenchmarkRefill measures a table that another program empties and refills in one
// commit, of which one rule is new: until the feed has it, and the CPU time of this
// process and of that program.
func BenchmarkRefill(b *testing.B) {
	for _, n := range []int{100, 2000} {
		for _, r := range methods() {
			if r.nft == nat.MethodGeneration {
				continue
			}
			b.Run(fmt.Sprintf("%s/%d", r.nft, n), func(b *testing.B) { benchmarkRefill(b, r.nft, n) })
		}
	}
}

func benchmarkRefill(b *testing.B, method string, n int) {
	w := newWorld(b)
	f := &signalFeed{newFeed(), make(chan time.Time, 64)}
	_, stop := w.startWith(nat.Options{LegacyPoll: time.Hour, Methods: []string{method}}, f)
	defer stop()
	eventually(b, "a first set", f.ready)
	before, others := cpuTime(unix.RUSAGE_SELF), cpuTime(unix.RUSAGE_CHILDREN)
	var waits []time.Duration
	for i := 0; b.Loop(); i++ {
		w.run(refill(n, i%2000), "nft", "-f", "-")
		done := time.Now()
		select {
		case at := <-f.changed:
			waits = append(waits, max(at.Sub(done), 0))
		case <-time.After(patience):
			b.Fatal("never reported")
		}
	}
	count := float64(len(waits))
	slices.Sort(waits)
	b.ReportMetric(float64(waits[len(waits)/2].Microseconds()), "µs-p50")
	b.ReportMetric(float64((cpuTime(unix.RUSAGE_SELF)-before).Microseconds())/count, "cpu-µs/commit")
	b.ReportMetric(float64((cpuTime(unix.RUSAGE_CHILDREN)-others).Microseconds())/count, "writer-cpu-µs/commit")
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
