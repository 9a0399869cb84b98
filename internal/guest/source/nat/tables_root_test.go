// SPDX-License-Identifier: Apache-2.0

//go:build linux && (root || vm)

package nat

import (
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"

	"github.com/fairlead/fairlead/internal/guest/source/nat/compile"
	"github.com/fairlead/fairlead/internal/guest/source/nat/watch"
	"github.com/fairlead/fairlead/internal/testkit/netns"
	"github.com/fairlead/fairlead/internal/testkit/rounds"
)

// tables makes random batches in tables that come and go, with a nat chain and without.
type tables struct {
	r     *rand.Rand
	conn  *nftables.Conn
	names [4]string       // of tables
	has   map[string]bool // those that there are, and chains as table/chain
	made  int             // names
	taken int
}

// one makes one batch. The kernel may refuse it.
func (w *tables) one() {
	has := maps.Clone(w.has)
	for range 1 + w.r.IntN(4) {
		w.change(has)
	}
	if w.conn.Flush() == nil {
		w.has = has
		w.taken++
	}
}

// change adds one change to the batch, after which there is what has has.
func (w *tables) change(has map[string]bool) {
	slot := w.r.IntN(len(w.names))
	if name := w.names[slot]; !has[name] && (name == "" || w.r.IntN(2) == 0) { // half of the time one is made again
		w.made++
		w.names[slot] = fmt.Sprint("t", w.made)
	}
	name := w.names[slot]
	t := &nftables.Table{Name: name, Family: nftables.TableFamilyIPv4}
	set := &nftables.Set{Table: t, Name: "s", KeyType: nftables.TypeInetService}
	if !has[name] {
		w.conn.AddTable(t)
		_ = w.conn.AddSet(set, nil)
		has[name] = true
	}
	chain := &nftables.Chain{Name: []string{"pre", "sub"}[w.r.IntN(2)], Table: t}
	if chain.Name == "pre" {
		chain.Type, chain.Hooknum, chain.Priority = nftables.ChainTypeNAT, nftables.ChainHookPrerouting, nftables.ChainPriorityNATDest
	}
	id := name + "/" + chain.Name
	switch op := w.r.IntN(20); {
	case op == 0:
		w.conn.DelTable(t)
		for _, k := range []string{name, name + "/pre", name + "/sub"} {
			delete(has, k)
		}
	case op < 3:
		_ = w.conn.SetAddElements(set, []nftables.SetElement{{Key: binaryutil.BigEndian.PutUint16(uint16(w.r.IntN(2000)))}})
	case !has[id]:
		w.conn.AddChain(chain)
		has[id] = true
	case op < 5:
		w.conn.FlushChain(chain)
		w.conn.DelChain(chain)
		delete(has, id)
	case op < 7:
		w.conn.FlushChain(chain)
	default:
		many := 1
		if op == 7 {
			many = 100 // which fill several packets
		}
		for range many {
			w.conn.AddRule(&nftables.Rule{Table: t, Chain: chain, Exprs: w.rule(set)})
		}
	}
}

func (w *tables) rule(set *nftables.Set) []expr.Any {
	if w.r.IntN(3) > 0 {
		return []expr.Any{&expr.Immediate{Register: 1, Data: binaryutil.BigEndian.PutUint16(uint16(w.r.IntN(1 << 16)))}}
	}
	return []expr.Any{
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
		&expr.Lookup{SourceRegister: 1, SetName: set.Name},
	}
}

// Tables get chains at nat hooks and lose them, while others change that do not matter and
// while the source reads. After each burst the model is what the kernel has.
// FAIRLEAD_ORDER_BATCHES sets how many batches there are.
func TestTablesThatComeAndGo(t *testing.T) {
	n := rounds.Of(t, "FAIRLEAD_ORDER_BATCHES", 600)
	ns, err := netns.New()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ns.Close() }()
	room := nftables.WithSockOptions(func(c *netlink.Conn) error { return c.SetReadBuffer(1 << 20) }) // for what answers a batch
	conn, err := nftables.New(nftables.WithNetNSFd(ns.FD()), nftables.AsLasting(), room)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.CloseLasting() }()
	filter, err := watch.LoadFilter(nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = filter.Close() }()
	k, err := watch.Open(slog.New(slog.DiscardHandler), fmt.Sprintf("/proc/self/fd/%d", ns.FD()), filter, 8<<20)
	if err != nil {
		t.Fatal(err)
	}
	defer k.Close()
	s, err := New(Options{Audit: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	x := newSession(s, &recorder{}, compile.New(4096), k)
	defer x.in.close()
	if err := x.begin(); err != nil {
		t.Fatal(err)
	}
	seed := rand.Uint64()
	w := &tables{r: rand.New(rand.NewPCG(seed, 1)), conn: conn, has: make(map[string]bool)}
	upTo := func() bool {
		gen, err := k.Generation()
		if err != nil {
			t.Fatal(err)
		}
		return x.in.covers(x.m.Generation(), gen) && x.settled() && !x.planned(dump) && !x.planned(applyCommits)
	}
	for burst := 0; w.taken < n; burst++ {
		written := make(chan struct{})
		go func() {
			defer close(written)
			for range 1 + w.r.IntN(20) {
				w.one()
				time.Sleep(time.Duration(w.r.IntN(1000)) * time.Microsecond)
			}
		}()
		for ended := false; !ended || !upTo(); {
			x.work(t.Context())
			select {
			case b := <-x.in.events:
				if err := x.takeAll(b); err != nil {
					t.Fatal(err)
				}
			case <-written:
				ended, written = true, nil
			case <-time.After(time.Millisecond):
			}
		}
		if burst%4 > 0 { // a dump is what tells the source which tables are followed
			continue
		}
		snap, err := k.Dump(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if d := x.m.Load(snap); d.Count != 0 {
			t.Fatalf("seed %d, after %d batches: %d differences: %q", seed, w.taken, d.Count, d.First)
		}
	}
	st := s.Status()
	if st.Lost != 0 || st.Failures != 0 {
		t.Errorf("seed %d: lost %d, failures %d", seed, st.Lost, st.Failures)
	}
	t.Logf("%d batches, %d applied, %d dumps, 0 differences", w.taken, st.Commits, st.Dumps)
}
