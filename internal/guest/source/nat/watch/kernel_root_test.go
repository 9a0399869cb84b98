// SPDX-License-Identifier: Apache-2.0

//go:build linux && (root || vm)

package watch

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/guest/source/nat/ruleset"
)

// newNetns makes a network namespace that ends with the test.
func newNetns(t *testing.T) *os.File {
	t.Helper()
	type made struct {
		f   *os.File
		err error
	}
	c := make(chan made, 1)
	go func() {
		runtime.LockOSThread() // the thread ends with the goroutine
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			c <- made{err: err}
			return
		}
		f, err := os.Open("/proc/thread-self/ns/net")
		c <- made{f, err}
	}()
	m := <-c
	if m.err != nil {
		t.Fatal(m.err)
	}
	t.Cleanup(func() { _ = m.f.Close() })
	return m.f
}

// A dump is of the generation that it names, also if it was read during commits. Each commit here puts another port into the only rule.
func TestDumpMatchesItsGeneration(t *testing.T) {
	ns := newNetns(t)
	conn, err := nftables.New(nftables.WithNetNSFd(int(ns.Fd())), nftables.AsLasting())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.CloseLasting() }()
	table := conn.AddTable(&nftables.Table{Name: "t", Family: nftables.TableFamilyIPv4})
	chain := conn.AddChain(&nftables.Chain{
		Name: "pre", Table: table, Type: nftables.ChainTypeNAT,
		Hooknum: nftables.ChainHookPrerouting, Priority: nftables.ChainPriorityNATDest,
	})
	stop := make(chan struct{})
	var writer sync.WaitGroup
	var failed error
	var pause atomic.Int64 // between commits, in nanoseconds
	commit := func(p uint16) error {
		conn.FlushChain(chain)
		conn.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: []expr.Any{
			&expr.Immediate{Register: 1, Data: binaryutil.BigEndian.PutUint16(p)},
		}})
		return conn.Flush()
	}
	if err := commit(0); err != nil {
		t.Fatal(err)
	}
	k, err := Open(slog.New(slog.DiscardHandler), fmt.Sprintf("/proc/self/fd/%d", ns.Fd()), nil, 8<<20)
	if err != nil {
		t.Fatal(err)
	}
	defer k.Close()
	first, err := k.Dump(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	writer.Go(func() {
		for p := uint16(1); failed == nil; p++ {
			select {
			case <-stop:
				return
			default:
				failed = commit(p)
				time.Sleep(time.Duration(pause.Load()))
			}
		}
	})
	good, moved := 0, 0
	for good < 100 {
		s, err := k.Dump(t.Context())
		if errors.Is(err, ErrMoved) { // the writer is just too fast for this machine
			moved++
			pause.Store(2*pause.Load() + int64(10*time.Microsecond))
			continue
		}
		pause.Store(pause.Load() / 2)
		if err != nil {
			t.Fatal(err)
		}
		good++
		rules := s.Tables[0].Chains[0].Rules
		if len(rules) != 1 {
			t.Fatalf("generation %d: %d rules", s.Generation, len(rules))
		}
		exprs, err := ruleset.ParseExprs(rules[0].Raw)
		if err != nil || len(exprs) != 1 {
			t.Fatalf("%v, %v", exprs, err)
		}
		p := binaryutil.BigEndian.Uint16(exprs[0].(ruleset.Immediate).Data)
		if want := uint16(s.Generation - first.Generation); p != want {
			t.Fatalf("the dump that names generation %d has that of %d commits before", s.Generation, want-p)
		}
	}
	close(stop)
	writer.Wait()
	if failed != nil {
		t.Error(failed)
	}
	t.Logf("%d dumps, %d overtaken", good, moved)
}
