// SPDX-License-Identifier: Apache-2.0

package nat

import (
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead/fairlead/internal/guest/source/nat/ruleset"
	"github.com/fairlead/fairlead/internal/testkit/natrules"
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

// Readings of an open order take no more than a quarter of the time, by themselves and
// together with those that further commits cause.
func TestOpenOrderIsReadWithinItsBudget(t *testing.T) {
	for _, endless := range []bool{false, true} {
		f := newFake(oneTable(80, 81))
		f.ordering = 100 * time.Millisecond
		run(t, Options{}, f, func(_ *Source, r *recorder) {
			expectPorts(t, r, 80, 81)
			f.set(withHandles([]uint64{101}, 81), 1000, nil) // which lacks what is new in the model
			f.events <- commitOf(2, deleted(100), newRule(200, 90))
			for gen := range uint32(30) {
				time.Sleep(100 * time.Millisecond)
				if endless {
					f.events <- commitOf(gen+3, deleted(uint64(200+gen)), newRule(uint64(201+gen), 90))
				}
			}
			f.mu.Lock()
			defer f.mu.Unlock()
			// One reading comes at once.
			if busy := time.Duration(f.orders) * f.ordering; f.orders < 5 || busy > 3*time.Second/4+f.ordering {
				t.Errorf("endless %v: %d readings take %v of 3 s", endless, f.orders, busy)
			}
		})
	}
}

// Where a commit waits to be applied, the order is not guessed before. If that commit
// does not answer it, it is guessed then.
func TestOpenOrderIsNotGuessedBeforeWaitingCommits(t *testing.T) {
	for _, answers := range []bool{true, false} {
		f := newFake(oneTable(80, 81))
		runSession(t, f, func(x *session, r *recorder) {
			expectPorts(t, r, 80, 81)
			x.load.idle = time.Now().Add(500 * time.Millisecond) // so that the next commit has to wait
			f.set(withHandles([]uint64{101}, 81), 3, nil)
			f.events <- commitOf(2, deleted(100), newRule(200, 90))
			time.Sleep(50 * time.Millisecond)
			next := commitOf(3, deleted(200))
			want := []int{81}
			if !answers {
				next, want = commitOf(3, newRule(201, 91)), []int{81, 90, 91}
			}
			f.events <- next
			time.Sleep(200 * time.Millisecond)
			f.mu.Lock()
			readings := f.orders
			f.mu.Unlock()
			if expectPorts(t, r, 80, 81); readings < orderAttempts {
				t.Errorf("read the chain %d times", readings)
			}
			time.Sleep(time.Second)
			expectPorts(t, r, want...)
			if r.applied != 1 {
				t.Errorf("stated %d changes", r.applied)
			}
		})
	}
}

// expectLeadsTo checks where the rule of port 80 leads.
func expectLeadsTo(t *testing.T, r *recorder, addr string) {
	t.Helper()
	synctest.Wait()
	r.mu.Lock()
	defer r.mu.Unlock()
	var got []netip.AddrPort
	for _, b := range r.set {
		if b.Port == 80 {
			got = append(got, b.Hints.Targets...)
		}
	}
	if want := []netip.AddrPort{netip.AddrPortFrom(netip.MustParseAddr(addr), 80)}; !slices.Equal(got, want) {
		t.Errorf("leads to %v, want %v", got, want)
	}
}

// A reading that a commit overtakes may lack rules that the kernel has. Where their
// places are guessed an audit follows.
func TestGuessFromOvertakenReadingIsAudited(t *testing.T) {
	to := func(s *ruleset.Snapshot, i int, addr string) *ruleset.Snapshot {
		s.Tables[0].Chains[0].Rules[i].Raw = natrules.Join(natrules.TCP(), natrules.Dport(80), natrules.DNAT(addr, 80))
		return s
	}
	for _, overtake := range []bool{true, false} {
		f := newFake(to(oneTable(70, 80), 1, "10.0.0.2"))
		run(t, Options{}, f, func(s *Source, r *recorder) {
			expectLeadsTo(t, r, "10.0.0.2")
			f.overtake = overtake
			f.set(to(withHandles([]uint64{101}, 80), 0, "10.0.0.2"), 2, nil)
			f.events <- commitOf(2, deleted(100), newRule(200, 80)) // to 10.0.0.1
			time.Sleep(400 * time.Millisecond)
			expectLeadsTo(t, r, "10.0.0.2")
			f.set(to(withHandles([]uint64{200, 101}, 80, 80), 1, "10.0.0.2"), 2, nil)
			time.Sleep(250 * time.Millisecond)
			st := s.Status()
			if !overtake {
				if st.Dumps != 1 {
					t.Errorf("%d dumps after a guess from a whole reading", st.Dumps)
				}
				return
			}
			expectLeadsTo(t, r, "10.0.0.1")
			if st.Dumps != 2 || st.Drift == 0 {
				t.Errorf("dumps %d, drift %d", st.Dumps, st.Drift)
			}
		})
	}
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
		f.events <- commitOf(2, deleted(100), deleted(4711), newRule(200, 90), newRule(201, 91))
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
