// SPDX-License-Identifier: Apache-2.0

package nat

import (
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead/fairlead/internal/source/nat/ruleset"
	"github.com/fairlead/fairlead/internal/source/nat/watch"
)

// hooksFirst is an order in which better methods are tried later.
var hooksFirst = []string{MethodFentry, MethodKprobe, MethodNetlink, MethodGeneration}

func TestFirstWorkingMethodIsUsed(t *testing.T) {
	for _, tt := range []struct {
		allowed []string
		broken  map[string]bool
		want    string
		err     bool
	}{
		{allowed: Methods(), want: "nfnetlink"},
		{allowed: Methods(), broken: map[string]bool{MethodNetlink: true}, want: "fentry"},
		{allowed: hooksFirst, want: "fentry"},
		{allowed: hooksFirst, broken: map[string]bool{MethodFentry: true}, want: "kprobe"},
		{allowed: hooksFirst, broken: map[string]bool{MethodFentry: true, MethodKprobe: true}, want: "nfnetlink"},
		{allowed: Methods(), broken: map[string]bool{MethodFentry: true, MethodKprobe: true, MethodNetlink: true}, want: "generation poll 1s"},
		{allowed: []string{MethodNetlink}, want: "nfnetlink"},
		{allowed: []string{MethodKprobe}, broken: map[string]bool{MethodKprobe: true}, err: true},
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

// Attaching hooks takes time, so the first set is published before.
func TestFirstSetDoesNotWaitForHooks(t *testing.T) {
	f := newFake(oneTable(80))
	f.attach = 3 * time.Second
	run(t, Options{Methods: hooksFirst}, f, func(s *Source, r *recorder) {
		time.Sleep(time.Second)
		expectPorts(t, r, 80)
		// What is committed while they are attached is read after that.
		f.set(oneTable(80, 81), 2, nil)
		time.Sleep(5 * time.Second)
		expectPorts(t, r, 80, 81)
		if got := r.methodNow(); !strings.HasPrefix(got, MethodFentry) {
			t.Errorf("method %q", got)
		}
		if st := s.Status(); st.Lost != 0 || st.Dumps != 2 || st.Method != MethodFentry {
			t.Errorf("lost %d, dumps %d, method %q", st.Lost, st.Dumps, st.Method)
		}
	})
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

// Hooks in a module can be attached to when it is loaded, at which time it is
// not yet ready. What was committed meanwhile is in the dump that follows.
func TestBetterMethodAfterModuleLoad(t *testing.T) {
	f := newFake(oneTable(80))
	f.broken = map[string]bool{MethodFentry: true, MethodKprobe: true}
	w := &wakes{}
	run(t, Options{Wake: w, Methods: hooksFirst}, f, func(s *Source, r *recorder) {
		expectPorts(t, r, 80)
		w.modules <- struct{}{} // another module
		time.Sleep(time.Minute)
		if got := r.methodNow(); !strings.HasPrefix(got, MethodNetlink) {
			t.Fatalf("method %q", got)
		}
		f.mu.Lock()
		f.watched = nil
		f.mu.Unlock()
		w.modules <- struct{}{}
		synctest.Wait()
		time.Sleep(50 * time.Millisecond)
		f.set(oneTable(80, 81), 5, nil)
		f.mu.Lock()
		f.hooks, f.broken[MethodKprobe] = true, false
		f.mu.Unlock()
		time.Sleep(time.Second)
		expectPorts(t, r, 80, 81)
		if got := r.methodNow(); !strings.HasPrefix(got, MethodKprobe) {
			t.Errorf("method %q", got)
		}
		f.events <- commitOf(6, newRule(1, 82))
		expectPorts(t, r, 80, 81, 82)
		if f.resolves == 0 {
			t.Error("messages of a hook were not completed")
		}
		// A module that is loaded later changes nothing.
		w.modules <- struct{}{}
		time.Sleep(time.Minute)
		f.mu.Lock()
		defer f.mu.Unlock()
		if want := []string{MethodFentry, MethodKprobe}; !slices.Equal(f.watched, want) {
			t.Errorf("tried %q, want %q", f.watched, want)
		}
		if st := s.Status(); st.Lost != 0 {
			t.Errorf("lost %d", st.Lost)
		}
	})
}

// A commit that is too large to be reported is dumped, and is no loss.
func TestLargeCommitIsDumped(t *testing.T) {
	f := newFake(oneTable(80))
	run(t, Options{}, f, func(s *Source, r *recorder) {
		expectPorts(t, r, 80)
		f.set(oneTable(80, 81), 9, nil)
		f.events <- batch{err: watch.ErrMany}
		time.Sleep(time.Second)
		expectPorts(t, r, 80, 81)
		if st := s.Status(); st.Lost != 0 || st.Dumps != 2 {
			t.Errorf("lost %d, dumps %d", st.Lost, st.Dumps)
		}
	})
}

// sparseCommit is a commit of a hook, which reported that of generation since before it.
func sparseCommit(gen, since uint32, msgs ...*ruleset.Message) batch {
	b := commitOf(gen, msgs...)
	end := b.msgs[len(b.msgs)-1]
	end.Sparse, end.Since = true, since
	return b
}

// Commits that a hook does not report leave no gap; a commit that it reported and that
// did not arrive does.
func TestSparseCommits(t *testing.T) {
	f := newFake(oneTable(80))
	run(t, Options{}, f, func(s *Source, r *recorder) {
		expectPorts(t, r, 80)
		f.events <- sparseCommit(5, 0, newRule(1, 81)) // the first since the hooks were attached
		expectPorts(t, r, 80, 81)
		f.events <- sparseCommit(6, 5, newRule(2, 82))
		f.events <- sparseCommit(900, 6, newRule(3, 83))
		expectPorts(t, r, 80, 81, 82, 83)
		if st := s.Status(); st.Lost != 0 || st.Dumps != 1 {
			t.Fatalf("lost %d, dumps %d", st.Lost, st.Dumps)
		}
		f.set(oneTable(80, 85), 905, nil)
		f.events <- sparseCommit(905, 903, newRule(4, 86))
		time.Sleep(time.Second)
		expectPorts(t, r, 80, 85)
		f.events <- sparseCommit(910, 903, newRule(5, 86)) // the dump has what was reported as 903
		expectPorts(t, r, 80, 85, 86)
		if st := s.Status(); st.Lost != 1 || st.Dumps != 2 {
			t.Errorf("lost %d, dumps %d", st.Lost, st.Dumps)
		}
	})
}

// An audit compares a dump of a later generation if no commit since the model's was
// reported, and waits if one was. So it does while a commit that it read has not ended:
// whether that is reported is not known yet.
func TestAuditAfterSparseCommits(t *testing.T) {
	f := newFake(oneTable(80))
	f.sparse, f.ended = true, 7
	run(t, Options{Audit: 10 * time.Second}, f, func(s *Source, r *recorder) {
		expectPorts(t, r, 80)
		f.set(oneTable(80, 90), 7, nil)
		f.mu.Lock()
		f.reported = 6
		f.mu.Unlock()
		time.Sleep(30 * time.Second)
		expectPorts(t, r, 80)
		f.mu.Lock()
		f.reported, f.ended = 1, 6
		f.mu.Unlock()
		time.Sleep(30 * time.Second)
		expectPorts(t, r, 80)
		f.mu.Lock()
		f.ended = 7
		f.mu.Unlock()
		time.Sleep(11 * time.Second)
		expectPorts(t, r, 80, 90)
		if st := s.Status(); st.Drift != 1 || st.Lost != 0 {
			t.Errorf("drift %d, lost %d", st.Drift, st.Lost)
		}
	})
}
