// SPDX-License-Identifier: Apache-2.0

//go:build linux && (root || vm)

package nat

import (
	"sync"
	"testing"
	"time"

	"github.com/google/nftables"

	"github.com/fairlead/fairlead/internal/guest/source/nat"
)

// Commits that leave the order of rules open, as fast as the kernel takes them, beside
// a table whose dump takes much longer than a commit: the source states its changes all
// the while. It dumps only to audit a guess, each time after guessDelay at least.
func TestOpenOrderInEndlessCommits(t *testing.T) {
	w := newWorld(t)
	w.run(refill(2000, 0)+pre, "nft", "-f", "-")
	conn := w.openConn(t)
	table := &nftables.Table{Name: "t", Family: nftables.TableFamilyIPv4}
	chain := &nftables.Chain{Name: "pre", Table: table}
	rule := func(p int) *nftables.Rule {
		return &nftables.Rule{Table: table, Chain: chain, Exprs: dnatRule(uint16(p))}
	}
	conn.AddRule(rule(1000))
	conn.AddRule(rule(999))
	if err := conn.Flush(); err != nil {
		t.Fatal(err)
	}
	const guessDelay = 500 * time.Millisecond // of internal/guest/source/nat
	began := time.Now()
	src, f, end := w.start(nat.Options{Methods: []string{nat.MethodNetlink}, Audit: time.Hour, LegacyPoll: time.Hour})
	eventually(t, "a first set", f.ready)
	changes := func() int {
		f.mu.Lock()
		defer f.mu.Unlock()
		return f.changes
	}
	stop := make(chan struct{})
	var writer sync.WaitGroup
	commits, last := 0, 1000
	var failed error
	writer.Go(func() {
		for failed == nil {
			select {
			case <-stop:
				return
			default:
			}
			rules, err := conn.GetRules(table, chain)
			if err != nil {
				failed = err
				return
			}
			last = 1001 + commits%1000
			next := rule(last)
			next.Handle = rules[0].Handle
			conn.ReplaceRule(next)
			failed = conn.Flush()
			commits++
		}
	})
	before := changes()
	eventually(t, "100 changes during the commits", func() bool { return changes() >= before+100 })
	if err := f.staleNow(); err != nil {
		t.Errorf("stale: %v", err)
	}
	close(stop)
	writer.Wait()
	if failed != nil {
		t.Fatal(failed)
	}
	eventually(t, "the last rule", func() bool {
		f.mu.Lock()
		defer f.mu.Unlock()
		at := map[int]bool{}
		for _, b := range f.set {
			at[int(b.Port)] = true
		}
		return len(at) == 2003 && at[last] && at[999]
	})
	end()
	most := 1 + uint64(time.Since(began)/guessDelay)
	if st := src.Status(); st.Dumps > most || st.Lost != 0 || st.Drift != 0 {
		t.Errorf("dumps %d, at most %d; lost %d, drift %d", st.Dumps, most, st.Lost, st.Drift)
	}
	t.Logf("%d commits, %d changes stated", commits, changes()-before)
}
