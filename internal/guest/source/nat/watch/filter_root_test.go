// SPDX-License-Identifier: Apache-2.0

//go:build linux && (root || vm)

package watch

import (
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"

	"github.com/fairlead/fairlead/internal/guest/source/nat/ruleset"
)

// writer commits to a namespace, which a filtered stream reports.
type writer struct {
	t      *testing.T
	k      *Kernel
	conn   *nftables.Conn
	stream Stream
}

func newWriter(t *testing.T, queue int) *writer {
	t.Helper()
	ns := newNetns(t)
	conn, err := nftables.New(nftables.WithNetNSFd(int(ns.Fd())), nftables.AsLasting())
	if err != nil {
		t.Fatal(err)
	}
	f, err := LoadFilter(nil)
	if err != nil {
		t.Fatal(err)
	}
	k, err := Open(slog.New(slog.DiscardHandler), fmt.Sprintf("/proc/self/fd/%d", ns.Fd()), f, queue)
	if err != nil {
		t.Fatal(err)
	}
	s, err := k.Watch()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(conn.CloseLasting(), s.Close(), f.Close()); err != nil {
			t.Error(err)
		}
		k.Close()
	})
	return &writer{t, k, conn, s}
}

func (w *writer) commit() {
	w.t.Helper()
	if err := w.conn.Flush(); err != nil {
		w.t.Fatal(err)
	}
}

// table makes a table with a chain and a set; the chain is at a nat hook if nat is set.
func (w *writer) table(family nftables.TableFamily, name string, nat bool) (*nftables.Chain, *nftables.Set) {
	w.t.Helper()
	table := w.conn.AddTable(&nftables.Table{Name: name, Family: family})
	chain := &nftables.Chain{Name: "c", Table: table}
	if nat {
		chain.Type, chain.Hooknum, chain.Priority = nftables.ChainTypeNAT, nftables.ChainHookPrerouting, nftables.ChainPriorityNATDest
	}
	w.conn.AddChain(chain)
	set := &nftables.Set{Table: table, Name: "s", KeyType: nftables.TypeInetService}
	if err := w.conn.AddSet(set, nil); err != nil {
		w.t.Fatal(err)
	}
	w.commit()
	return chain, set
}

func (w *writer) rule(c *nftables.Chain) {
	w.conn.AddRule(&nftables.Rule{Table: c.Table, Chain: c, Exprs: []expr.Any{&expr.Counter{}}})
}

func (w *writer) elements(s *nftables.Set, from, n int) {
	w.t.Helper()
	list := make([]nftables.SetElement, n)
	for i := range list {
		list[i].Key = binaryutil.BigEndian.PutUint16(uint16(from + i))
	}
	if err := w.conn.SetAddElements(s, list); err != nil {
		w.t.Fatal(err)
	}
}

// TestFilter checks after which commits something arrives.
func TestFilter(t *testing.T) {
	w := newWriter(t, 8<<20)
	pre, ports := w.table(nftables.TableFamilyIPv4, "nat", true)
	long, _ := w.table(nftables.TableFamilyIPv4, strings.Repeat("x", 63), false)
	last, _ := w.table(nftables.TableFamilyIPv4, strings.Repeat("x", 62), false)
	other, set := w.table(nftables.TableFamilyIPv4, "other", false)
	same, _ := w.table(nftables.TableFamilyIPv6, "nat", false)
	snap, err := w.k.Dump(t.Context())
	if err != nil || len(snap.Tables) != 1 || len(snap.Others) != 4 {
		t.Fatalf("%+v, %v", snap, err)
	}
	// arrived returns how many messages of each commit have arrived, up to one in a table that
	// is followed.
	arrived := func() (commits []int) {
		t.Helper()
		w.rule(pre)
		w.commit()
		gen, err := w.k.Generation()
		if err != nil {
			t.Fatal(err)
		}
		for n := 0; ; {
			msgs, err := w.stream.Next()
			if err != nil {
				t.Fatal(err)
			}
			for _, m := range msgs {
				if n++; m.Type != ruleset.MsgNewGen {
					continue
				}
				commits, n = append(commits, n-1), 0
				if m.Generation == gen {
					if passed, err := w.stream.Passed(); err != nil || passed != gen {
						t.Errorf("passed %d, %v; want %d", passed, err, gen)
					}
					return commits[:len(commits)-1]
				}
			}
		}
	}
	if got := arrived(); !slices.Equal(got, []int{3, 3, 3, 3, 3}) {
		t.Errorf("new tables: %v", got)
	}
	for _, c := range []struct {
		what   string
		commit func()
		want   []int
	}{
		{"nothing", func() { w.elements(set, 1, 1) }, nil},
		{"a rule", func() { w.rule(other) }, nil},
		{"a rule of a table of the same name", func() { w.rule(same) }, nil},
		{"a set", func() {
			_ = w.conn.AddSet(&nftables.Set{Table: other.Table, Name: "more", KeyType: nftables.TypeInetService}, nil)
		}, nil},
		{"many elements", func() { w.elements(set, 1000, 1000) }, nil},
		{"a chain", func() { w.conn.AddChain(&nftables.Chain{Name: "d", Table: other.Table}) }, []int{1}},
		{"elements, and then one that matters", func() { w.elements(set, 10, 3); w.elements(ports, 20, 1) }, []int{4}},
		{"a rule of a long name", func() { w.rule(long) }, []int{1}},
		{"a rule of a name that just fits", func() { w.rule(last) }, nil},
		{"elements of a table that is followed", func() { w.elements(ports, 1, 2) }, []int{2}},
		{"a chain goes", func() { w.conn.DelChain(&nftables.Chain{Name: "d", Table: other.Table}) }, []int{1}},
		{"a table goes", func() { w.conn.DelTable(same.Table) }, []int{4}},
	} {
		c.commit()
		w.commit()
		if got := arrived(); !slices.Equal(got, c.want) {
			t.Errorf("%s: %v messages, want %v", c.what, got, c.want)
		}
	}
	// A commit of several packets, of which each has something that passes, arrives in full.
	for range 50 {
		w.rule(pre)
		w.rule(other)
	}
	w.commit()
	if got := arrived(); !slices.Equal(got, []int{100}) {
		t.Errorf("many rules: %v messages, want 100", got)
	}
}

// More tables than the filter can know end it, and all is read.
func TestTooManyTablesToFilter(t *testing.T) {
	w := newWriter(t, 8<<20)
	other, _ := w.table(nftables.TableFamilyIPv4, "other", false)
	if _, err := w.stream.Next(); err != nil {
		t.Fatal(err)
	}
	var tables []*ruleset.Table
	for i := range 1100 {
		tables = append(tables, &ruleset.Table{ID: ruleset.TableID{Family: ruleset.FamilyIP, Name: fmt.Sprint("t", i)}})
	}
	w.k.follow(tables[:1000])
	if !w.stream.Filtered() {
		t.Error("not filtered with 1,000 tables")
	}
	w.k.follow(tables)
	w.rule(other)
	w.commit()
	for {
		msgs, err := w.stream.Next()
		if err != nil {
			t.Fatal(err)
		}
		if msgs[0].Type == ruleset.MsgNewRule {
			break
		}
	}
	if w.stream.Filtered() {
		t.Error("filtered with 1,100 tables")
	}
}

// Each commit after a dump is reported that changes a table of the dump, also one that
// nothing was known of before.
func TestDumpIsFollowed(t *testing.T) {
	w := newWriter(t, 8<<20)
	for i := range 100 {
		pre, _ := w.table(nftables.TableFamilyIPv4, fmt.Sprint("t", i), true)
		stop, written := make(chan struct{}), make(chan error)
		go func() {
			for {
				w.rule(pre)
				err := w.conn.Flush()
				select {
				case <-stop:
					written <- err
					return
				default:
				}
			}
		}()
		snap, err := w.k.Dump(t.Context())
		for errors.Is(err, ErrMoved) {
			snap, err = w.k.Dump(t.Context())
		}
		if err != nil {
			t.Fatal(err)
		}
		close(stop)
		if err := <-written; err != nil {
			t.Fatal(err)
		}
		w.rule(pre)
		w.commit()
		last, err := w.k.Generation()
		if err != nil {
			t.Fatal(err)
		}
		for next := snap.Generation + 1; next <= last; {
			msgs, err := w.stream.Next()
			if err != nil {
				t.Fatal(err)
			}
			for _, m := range msgs {
				if m.Type != ruleset.MsgNewGen || m.Generation < next {
					continue
				}
				if m.Generation != next {
					t.Fatalf("table %d: generation %d is missing of those from %d to %d", i, next, snap.Generation+1, last)
				}
				next++
			}
		}
		w.conn.DelTable(pre.Table)
		w.commit()
	}
}

// What is lost after an overflow, before the queue was empty, is no overflow to the kernel.
func TestLossAfterOverflowIsNoticed(t *testing.T) {
	w := newWriter(t, 4096)
	pre, _ := w.table(nftables.TableFamilyIPv4, "nat", true)
	if _, err := w.k.Dump(t.Context()); err != nil {
		t.Fatal(err)
	}
	for range 200 {
		w.rule(pre)
		w.commit()
	}
	for i := range 2 {
		if _, err := w.stream.Next(); !errors.Is(err, ErrLost) {
			t.Fatalf("after loss %d: %v", i, err)
		}
		w.rule(pre)
		w.commit()
	}
	for range 1000 {
		w.rule(pre)
		w.commit()
		if msgs, err := w.stream.Next(); err == nil && msgs[len(msgs)-1].Type == ruleset.MsgNewGen {
			return
		}
	}
	t.Error("never followed again")
}
