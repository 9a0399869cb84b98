// SPDX-License-Identifier: Apache-2.0

package nat

import (
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/source/nat/ruleset"
	"github.com/fairlead/fairlead/test/kit/natrules"
)

func deleted(handle uint64) *ruleset.Message {
	return &ruleset.Message{Type: ruleset.MsgDelRule, Table: natrules.Table, Chain: "pre", Handle: handle}
}

// withHandles is oneTable of ports, whose rules have the given handles.
func withHandles(handles []uint64, ports ...uint16) *ruleset.Snapshot {
	s := oneTable(ports...)
	for i, h := range handles {
		s.Tables[0].Chains[0].Rules[i].Handle = h
	}
	return s
}

// A rule that replaces the first one of a chain is notified without a position, like
// one that is appended. So the chain is read before its new rules are stated.
func TestOpenOrderIsRead(t *testing.T) {
	replacement := newRule(200, 90)
	appended := newRule(201, 91)
	appended.Create = true
	f := newFake(oneTable(80, 81))
	run(t, Options{}, f, func(s *Source, r *recorder) {
		expectPorts(t, r, 80, 81)
		f.set(withHandles([]uint64{200, 101, 201}, 90, 81, 91), 2, nil)
		f.events <- commitOf(2, deleted(100), replacement, appended)
		expectPorts(t, r, 81, 90, 91)
		if f.orders != 1 {
			t.Errorf("read %d chains", f.orders)
		}
		f.events <- commitOf(3, newRule(202, 92))
		expectPorts(t, r, 81, 90, 91, 92)
		f.set(withHandles([]uint64{200, 101, 201, 202}, 90, 81, 91, 92), 3, nil)
		time.Sleep(time.Hour) // an audit finds nothing
		if st := s.Status(); st.Drift != 0 || st.Lost != 0 || f.orders != 1 {
			t.Errorf("drift %d, lost %d, read %d chains", st.Drift, st.Lost, f.orders)
		}
	})
}

// While the order is open nothing is stated. A reading that lacks a rule waits for the
// commit that deletes it.
func TestOpenOrderIsNotStated(t *testing.T) {
	f := newFake(oneTable(80, 81))
	run(t, Options{}, f, func(s *Source, r *recorder) {
		expectPorts(t, r, 80, 81)
		f.set(withHandles([]uint64{101}, 81), 3, nil)
		f.events <- commitOf(2, deleted(100), newRule(200, 90))
		f.hosts.Notify()
		expectPorts(t, r, 80, 81)
		f.events <- commitOf(3, deleted(200))
		expectPorts(t, r, 81)
		if st := s.Status(); st.Drift != 0 || st.Lost != 0 || st.Dumps != 1 {
			t.Errorf("drift %d, lost %d, dumps %d", st.Drift, st.Lost, st.Dumps)
		}
	})
}

// Commits that leave the order open again and again, and that overtake each reading of
// it, do not keep the source from stating what it knows.
func TestOpenOrderEnds(t *testing.T) {
	f := newFake(oneTable(80, 81))
	run(t, Options{}, f, func(s *Source, r *recorder) {
		expectPorts(t, r, 80, 81)
		stated := func() int {
			r.mu.Lock()
			defer r.mu.Unlock()
			return r.applied
		}
		last := uint64(100)
		for gen := range uint32(1000) {
			f.set(withHandles([]uint64{101}, 81), gen+10, nil) // the kernel is ahead of what it has reported
			f.events <- commitOf(gen+2, deleted(last), newRule(uint64(200+gen), uint16(1000+gen)))
			last = uint64(200 + gen)
			time.Sleep(time.Millisecond)
		}
		if n := stated(); n < 10 {
			t.Errorf("stated %d changes in 1,000 commits", n)
		}
		time.Sleep(time.Second)
		expectPorts(t, r, 81, 1999)
		if st := s.Status(); r.isStale() != nil || st.Lost != 0 || st.Dumps != 1 {
			t.Errorf("stale %v, lost %d, dumps %d", r.isStale(), st.Lost, st.Dumps)
		}
	})
}

// A commit that does not fit the model is applied in part until the next dump. What
// makes the source state its model in between states nothing of it.
func TestHalfAppliedCommitIsNotStated(t *testing.T) {
	f := newFake(oneTable(80, 81))
	f.dumpTime = time.Second // so that the next dump has to wait
	w := &wakes{}
	run(t, Options{Wake: w}, f, func(s *Source, r *recorder) {
		time.Sleep(time.Second)
		expectPorts(t, r, 80, 81)
		f.set(withHandles([]uint64{101, 200, 201}, 81, 90, 91), 2, nil)
		f.events <- commitOf(2, deleted(100), newRule(200, 90), deleted(4711), newRule(201, 91))
		expectPorts(t, r, 80, 81)
		w.c <- struct{}{} // reads the legacy tables
		f.hosts.Notify()
		time.Sleep(10 * time.Millisecond)
		expectPorts(t, r, 80, 81)
		if st := s.Status(); st.Dumps != 1 || st.Lost != 1 {
			t.Fatalf("dumps %d, lost %d", st.Dumps, st.Lost)
		}
		time.Sleep(time.Minute)
		expectPorts(t, r, 81, 90, 91)
		if err := r.isStale(); err != nil {
			t.Errorf("stale: %v", err)
		}
	})
}
