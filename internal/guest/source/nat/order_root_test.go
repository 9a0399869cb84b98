// SPDX-License-Identifier: Apache-2.0

//go:build linux && (root || vm)

package nat

import (
	"fmt"
	"log/slog"
	"math/rand/v2"
	"testing"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"

	"github.com/fairlead/fairlead/internal/guest/source/nat/compile"
	"github.com/fairlead/fairlead/internal/guest/source/nat/ruleset"
	"github.com/fairlead/fairlead/internal/guest/source/nat/watch"
	"github.com/fairlead/fairlead/internal/testkit/netns"
	"github.com/fairlead/fairlead/internal/testkit/rounds"
)

// batches makes random batches in the chains of one table.
type batches struct {
	r      *rand.Rand
	k      *watch.Kernel
	conn   *nftables.Conn
	table  *nftables.Table
	chains []*nftables.Chain
	port   uint16
	text   string // of the batch
}

func (b *batches) rule(chain *nftables.Chain, position, handle uint64) *nftables.Rule {
	b.port++
	return &nftables.Rule{Table: b.table, Chain: chain, Position: position, Handle: handle, Exprs: []expr.Any{
		&expr.Immediate{Register: 1, Data: binaryutil.BigEndian.PutUint16(b.port)},
	}}
}

// one makes one batch of up to six changes, most of them in one chain. It reports
// whether the kernel took it.
func (b *batches) one(t *testing.T) bool {
	t.Helper()
	b.text = ""
	favourite := b.chains[b.r.IntN(len(b.chains))]
	for range 1 + b.r.IntN(6) {
		chain := favourite
		if b.r.IntN(5) == 0 {
			chain = b.chains[b.r.IntN(len(b.chains))]
		}
		rules, err := b.k.Rules(ruleset.ChainID{Table: ruleset.TableID{Family: ruleset.FamilyIP, Name: b.table.Name}, Name: chain.Name})
		if err != nil {
			t.Fatal(err)
		}
		var handle uint64
		if len(rules) > 0 {
			handle = rules[b.r.IntN(len(rules))].Handle
		}
		op := b.r.IntN(9)
		switch {
		case len(rules) > 8 && op < 3, len(rules) > 0 && b.r.IntN(12) == 0:
			op = 9
			b.conn.FlushChain(chain)
		case handle == 0 || op == 0:
			op = 0
			b.conn.AddRule(b.rule(chain, 0, 0))
		case op == 1:
			b.conn.InsertRule(b.rule(chain, 0, 0))
		case op == 2:
			b.conn.AddRule(b.rule(chain, handle, 0))
		case op == 3:
			b.conn.InsertRule(b.rule(chain, handle, 0))
		case op < 6:
			b.conn.ReplaceRule(b.rule(chain, 0, handle))
		default:
			if err := b.conn.DelRule(&nftables.Rule{Table: b.table, Chain: chain, Handle: handle}); err != nil {
				t.Fatal(err)
			}
		}
		b.text += fmt.Sprintf(" %s:%d@%d", chain.Name, op, handle)
	}
	return b.conn.Flush() == nil // a batch may name a rule twice
}

// After random batches, which delete rules and put others next to them, the model is
// what the kernel has. FAIRLEAD_ORDER_BATCHES sets how many there are, with the filter and
// without.
func TestOrderOfRandomBatches(t *testing.T) {
	n := rounds.Of(t, "FAIRLEAD_ORDER_BATCHES", 300)
	t.Run("filtered", func(t *testing.T) {
		filter, err := watch.LoadFilter(nil)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = filter.Close() }()
		orderOfRandomBatches(t, filter, n)
	})
	t.Run("all", func(t *testing.T) { orderOfRandomBatches(t, nil, n) })
}

// counted counts the readings of chains.
type counted struct {
	*watch.Kernel
	reads int
}

func (c *counted) Rules(id ruleset.ChainID) ([]ruleset.Rule, error) {
	c.reads++
	return c.Kernel.Rules(id)
}

func orderOfRandomBatches(t *testing.T, filter watch.Filter, n int) {
	ns, err := netns.New()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ns.Close() }()
	conn, err := nftables.New(nftables.WithNetNSFd(ns.FD()), nftables.AsLasting())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.CloseLasting() }()
	k, err := watch.Open(slog.New(slog.DiscardHandler), fmt.Sprintf("/proc/self/fd/%d", ns.FD()), filter, 8<<20)
	if err != nil {
		t.Fatal(err)
	}
	defer k.Close()
	seed := rand.Uint64()
	b := &batches{r: rand.New(rand.NewPCG(seed, 1)), k: k, conn: conn, table: conn.AddTable(&nftables.Table{Name: "t", Family: nftables.TableFamilyIPv4})}
	b.chains = []*nftables.Chain{
		conn.AddChain(&nftables.Chain{
			Name: "pre", Table: b.table, Type: nftables.ChainTypeNAT,
			Hooknum: nftables.ChainHookPrerouting, Priority: nftables.ChainPriorityNATDest,
		}),
		conn.AddChain(&nftables.Chain{Name: "other", Table: b.table}),
	}
	if err := conn.Flush(); err != nil {
		t.Fatal(err)
	}
	s, err := New(Options{Methods: []string{MethodNetlink}})
	if err != nil {
		t.Fatal(err)
	}
	sys := &counted{Kernel: k}
	x := newSession(s, &recorder{}, compile.New(4096), sys)
	defer x.in.close()
	if err := x.watch(); err != nil {
		t.Fatal(err)
	}
	x.readDump(t.Context())
	taken := 0
	for taken < n {
		for range 1 + b.r.IntN(2) {
			if b.one(t) {
				taken++
			}
		}
		want, err := k.Generation()
		if err != nil {
			t.Fatal(err)
		}
		for x.m.Generation() != want {
			if err := x.takeAll(<-x.in.events); err != nil {
				t.Fatal(err)
			}
			if x.due.Cancel(applyCommits); len(x.in.pending) > 0 {
				x.applyPending()
			}
			if x.planned(dump) {
				t.Fatalf("seed %d: a dump is needed after%s", seed, b.text)
			}
		}
		if !x.settled() {
			t.Fatalf("seed %d: the order is still open after%s", seed, b.text)
		}
		snap, err := k.Dump(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if differ := x.m.Load(snap); differ.Count != 0 {
			t.Fatalf("seed %d, after %d batches: %d rules differ after%s: %q", seed, taken, differ.Count, b.text, differ.First)
		}
	}
	t.Logf("%d batches, %d readings of a chain, 0 differences", taken, sys.reads)
}
