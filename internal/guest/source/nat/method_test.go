// SPDX-License-Identifier: Apache-2.0

package nat

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead/fairlead/internal/guest/source/nat/ruleset"
	"github.com/fairlead/fairlead/internal/guest/source/nat/watch"
)

func TestFirstWorkingMethodIsUsed(t *testing.T) {
	for _, tt := range []struct {
		allowed []string
		broken  bool
		want    string
		err     bool
	}{
		{allowed: Methods(), want: "nfnetlink"},
		{allowed: Methods(), broken: true, want: "generation poll 1s"},
		{allowed: []string{MethodGeneration}, want: "generation poll 1s"},
		{allowed: []string{MethodNetlink}, broken: true, err: true},
	} {
		f := newFake(oneTable(80))
		f.broken = tt.broken
		run(t, Options{Methods: tt.allowed}, f, func(_ *Source, r *recorder) {
			synctest.Wait()
			method, _, _ := strings.Cut(r.methodNow(), ",")
			if method != tt.want || (r.isStale() != nil) != tt.err {
				t.Errorf("allowed %q, broken %v: method %q, stale %v", tt.allowed, tt.broken, method, r.isStale())
			}
		})
	}
}

// If nothing reports commits, the generation is polled.
func TestGenerationPoll(t *testing.T) {
	f := newFake(oneTable(80))
	run(t, Options{Methods: []string{MethodGeneration}}, f, func(_ *Source, r *recorder) {
		expectPorts(t, r, 80)
		time.Sleep(time.Minute)
		synctest.Wait()
		if f.dumps != 1 {
			t.Errorf("%d dumps though nothing was committed", f.dumps)
		}
		f.set(oneTable(80, 81), 2, nil)
		time.Sleep(2 * generationPoll)
		expectPorts(t, r, 80, 81)
	})
}

// A kernel that lacks the modules at the start may get them. What was committed meanwhile
// is in the dump that follows.
func TestNotificationsAreUsedWhenThereAreSome(t *testing.T) {
	f := newFake(&ruleset.Snapshot{})
	f.broken, f.dumpErr = true, watch.ErrAbsent
	run(t, Options{Methods: Methods()}, f, func(s *Source, r *recorder) {
		time.Sleep(time.Minute)
		if got := r.methodNow(); !strings.HasPrefix(got, "generation poll") {
			t.Fatalf("method %q", got)
		}
		f.set(oneTable(80), 5, nil)
		f.mu.Lock()
		f.broken = false
		f.mu.Unlock()
		time.Sleep(2 * absentPoll)
		expectPorts(t, r, 80)
		if got := r.methodNow(); !strings.HasPrefix(got, MethodNetlink) || s.Status().Method != MethodNetlink {
			t.Errorf("method %q, %q", got, s.Status().Method)
		}
		f.events <- commitOf(6, newRule(1, 81))
		expectPorts(t, r, 80, 81)
	})
}

// Commits that a filter leaves out are no gap. A table that gets a nat chain is read, as
// its rules may have been left out.
func TestFilteredCommits(t *testing.T) {
	f := newFake(oneTable(80))
	f.filtered = true
	run(t, Options{}, f, func(s *Source, r *recorder) {
		expectPorts(t, r, 80)
		f.events <- commitOf(6, newRule(1, 81))
		f.events <- commitOf(900, newRule(2, 82))
		expectPorts(t, r, 80, 81, 82)
		other := ruleset.TableID{Family: ruleset.FamilyIP, Name: "other"}
		table := &ruleset.Message{Type: ruleset.MsgNewTable, Table: other, Handle: 9}
		f.events <- commitOf(901, table, &ruleset.Message{Type: ruleset.MsgDelRule, Table: other, Chain: "left out", Handle: 3})
		f.events <- commitOf(905, newRule(3, 83))
		expectPorts(t, r, 80, 81, 82, 83)
		if st := s.Status(); st.Dumps != 1 {
			t.Errorf("dumps %d", st.Dumps)
		}
		f.set(oneTable(80, 90), 907, nil)
		table.Table.Name = "new"
		f.events <- commitOf(906, table, &ruleset.Message{
			Type: ruleset.MsgNewChain, Table: table.Table, Chain: "pre", Handle: 1, Hook: &ruleset.Hook{Type: "nat"},
		})
		time.Sleep(time.Second)
		expectPorts(t, r, 80, 90)
		if st := s.Status(); st.Lost != 0 || st.Dumps != 2 {
			t.Errorf("lost %d, dumps %d", st.Lost, st.Dumps)
		}
	})
}

// An audit compares a dump of a later generation if no commit since the model's has
// passed the filter, and waits if one has.
func TestAuditAfterFilteredCommits(t *testing.T) {
	f := newFake(oneTable(80))
	f.filtered = true
	run(t, Options{Audit: 10 * time.Second}, f, func(s *Source, r *recorder) {
		expectPorts(t, r, 80)
		f.set(oneTable(80, 90), 7, nil)
		f.mu.Lock()
		f.passed = 6
		f.mu.Unlock()
		time.Sleep(30 * time.Second)
		expectPorts(t, r, 80)
		f.mu.Lock()
		f.passed = 1
		f.mu.Unlock()
		time.Sleep(11 * time.Second)
		expectPorts(t, r, 80, 90)
		if st := s.Status(); st.Drift != 1 || st.Lost != 0 {
			t.Errorf("drift %d, lost %d", st.Drift, st.Lost)
		}
	})
}
