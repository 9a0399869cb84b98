// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"log/slog"
	"strconv"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// confirms asks for a list and returns what tells whether it was answered.
func confirms(t *testing.T, facts *Table) (answered func() bool) {
	t.Helper()
	var done atomic.Bool
	if !facts.Confirm(func() { done.Store(true) }) {
		t.Error("the engine is not asked")
	}
	return func() bool { synctest.Wait(); return done.Load() }
}

// slowList is an engine whose lists wait for the test.
type slowList struct {
	*scripted

	lists chan []Object
	began atomic.Int32
}

func (s *slowList) List(ctx context.Context) ([]Object, error) {
	s.began.Add(1)
	select {
	case l := <-s.lists:
		return l, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// A list that was under way may have missed what appeared before the request.
func TestRequestIsAnsweredByAListThatBeganLater(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := &slowList{scripted: &scripted{}, lists: make(chan []Object)}
		var facts Table
		followed(t, e, Stream{}, &facts)
		synctest.Wait()
		answered := confirms(t, &facts)
		synctest.Wait()
		e.lists <- nil
		if answered() {
			t.Error("answered by a list that began before")
		}
		e.lists <- []Object{named("x", "")}
		if !answered() {
			t.Error("not answered by a list")
		}
		if _, known := facts.Fact("x"); !known {
			t.Error("answered before the facts were there")
		}
		if n := e.began.Load(); n != 2 {
			t.Errorf("%d lists, want 2", n)
		}
	})
}

// A container that is starting is in no list of what runs, and can be looked at when it runs: one
// of which an event came, and one of which none came yet.
func TestRequestWaitsForLooks(t *testing.T) {
	for name, may := range map[string][]string{"event": nil, "none yet": {"x"}} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				gate := make(chan struct{})
				e := &scripted{may: may, look: map[string]Object{"x": named("x", "/docker/x")}, all: gate}
				events := make(chan Event)
				var facts Table
				followed(t, e, Stream{Events: events}, &facts)
				synctest.Wait()
				if may == nil {
					events <- Event{ID: "x"}
				}
				answered := confirms(t, &facts)
				time.Sleep(time.Minute)
				if answered() {
					t.Error("answered though a container is still being looked at")
				}
				close(gate)
				if !answered() {
					t.Error("not answered after the look")
				}
				if _, known := facts.Fact("x"); !known {
					t.Error("answered before the facts were there")
				}
			})
		})
	}
}

// Containers that do not run may be many. They are looked at for requests alone, and delay no other
// look.
func TestLooksForARequestDelayNoOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		gate := make(chan struct{})
		e := &scripted{look: map[string]Object{"new": object("new"), "old19": object("old19")}, all: gate}
		for i := range 20 {
			e.may = append(e.may, "old"+strconv.Itoa(i))
		}
		events := make(chan Event)
		var facts Table
		f := followed(t, e, Stream{Events: events}, &facts)
		looks := func() int {
			synctest.Wait()
			e.mu.Lock()
			defer e.mu.Unlock()
			return e.looked
		}
		if n := looks(); n != 0 {
			t.Errorf("%d looks without a request", n)
		}
		answered := confirms(t, &facts)
		if n := looks(); n != lookers {
			t.Errorf("%d looks at once, want %d", n, lookers)
		}
		events <- Event{ID: "new"}
		events <- Event{ID: "old19"} // it runs now
		for range lookers {
			gate <- struct{}{}
		}
		for range 2 {
			gate <- struct{}{}
			gate <- struct{}{}
		}
		synctest.Wait()
		if !f.has("new") || !f.has("old19") {
			t.Error("a container that runs waits for looks at those that do not")
		}
		if answered() {
			t.Error("answered before all looks")
		}
		close(gate)
		if !answered() {
			t.Error("not answered")
		}
		if n := looks(); n != 21 {
			t.Errorf("%d looks, want one at each container", n)
		}
	})
}

// A request has only those containers looked at that an earlier look did not find.
func TestRequestLooksAtNewContainersOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := &scripted{look: make(map[string]Object)}
		add := func(id string) {
			e.mu.Lock()
			defer e.mu.Unlock()
			o := named(id, "")
			o.Partial = true
			e.list, e.look[id] = append(e.list, o), named(id, "/docker/"+id)
		}
		looks := func() int {
			synctest.Wait()
			e.mu.Lock()
			defer e.mu.Unlock()
			n := e.looked
			e.looked = 0
			return n
		}
		for _, id := range []string{"a", "b", "c"} {
			add(id)
		}
		var facts Table
		followed(t, e, Stream{}, &facts)
		if n := looks(); n != 3 {
			t.Errorf("%d looks after the first list, want 3", n)
		}
		for range 3 {
			if !confirms(t, &facts)() {
				t.Error("not answered")
			}
		}
		if n := looks(); n != 0 {
			t.Errorf("%d looks though nothing is new", n)
		}
		add("d")
		if !confirms(t, &facts)() {
			t.Error("not answered")
		}
		if n := looks(); n != 1 {
			t.Errorf("%d looks, want one at the new container", n)
		}
		time.Sleep(time.Hour)
		if n := looks(); n != 4 {
			t.Errorf("%d looks at an audit, want all 4", n)
		}
	})
}

// Where the processes of containers are not visible, a look finds no cgroup, and another
// one would not either.
func TestRequestDoesNotRepeatLooksThatFoundNoCgroup(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		partial := named("x", "")
		partial.Partial = true
		e := &scripted{list: []Object{partial}, look: map[string]Object{"x": named("x", "")}}
		looks := func(when string, want int) {
			t.Helper()
			synctest.Wait()
			e.mu.Lock()
			defer e.mu.Unlock()
			if e.looked != want {
				t.Errorf("%s: %d looks, want %d", when, e.looked, want)
			}
			e.looked = 0
		}
		look := func(o Object) {
			e.mu.Lock()
			defer e.mu.Unlock()
			e.look["x"] = o
		}
		events := make(chan Event)
		var facts Table
		followed(t, e, Stream{Events: events}, &facts)
		looks("the first list", 1)
		request := func(when string, want int) {
			t.Helper()
			for range 3 {
				if !confirms(t, &facts)() {
					t.Errorf("%s: not answered", when)
				}
			}
			looks(when, want)
		}
		request("requests", 0)
		events <- Event{ID: "x"}
		looks("an event", 1)
		request("requests after an event", 0)

		look(partial) // the engine could not inspect it
		events <- Event{ID: "x", Gone: true}
		events <- Event{ID: "x"}
		looks("it was started again", 1)
		request("it was not inspected since", 3)
		look(named("x", ""))
		request("it can be inspected", 1)
		time.Sleep(time.Hour)
		looks("an audit", 1)
	})
}

// absentLater is an engine that is gone when it is listed.
type absentLater struct{ scripted }

func (*absentLater) List(context.Context) ([]Object, error) { return nil, ErrAbsent }

// A session may take a request and then find that there is no engine.
func TestRequestIsTakenOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSupervised(t)
		answered := confirms(t, &s.facts)
		s.run(t, time.Minute, func(ctx context.Context, up func()) error {
			return NewSet(slog.New(slog.DiscardHandler), s.feed, &s.facts, Host{}).Follow(ctx, &absentLater{}, Stream{}, time.Hour, up)
		})
		if !answered() {
			t.Error("not answered")
		}
	})
}

// Where there is no engine, each request has it tried, and nobody waits for long.
func TestRequestIsAnsweredWhereThereIsNoEngine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSupervised(t)
		timer := time.AfterFunc(time.Minute, s.publish)
		defer timer.Stop()
		decided := time.AfterFunc(time.Minute+5*time.Second, func() {
			if p, _ := s.r.Publications().View().Get(secret); !p.Decision.Allow {
				t.Errorf("5 s after the port appeared: %+v", p.Decision)
			}
		})
		defer decided.Stop()
		tries := 0
		s.run(t, absentDelay-time.Second, func(context.Context, func()) error {
			tries++
			return ErrAbsent
		})
		if tries != 3 {
			t.Errorf("%d tries, want one at the start and one for each of two requests", tries)
		}
	})
}

// An engine that is found by a request is listed before the wait can end.
func TestRequestFindsAnEngine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSupervised(t)
		timer := time.AfterFunc(time.Minute, s.publish)
		defer timer.Stop()
		tries := 0
		s.run(t, 4*time.Minute, func(ctx context.Context, up func()) error {
			if tries++; tries == 1 {
				return ErrAbsent
			}
			named := object("c")
			named.Fact = secretFact()
			return NewSet(slog.New(slog.DiscardHandler), s.feed, &s.facts, Host{}).Follow(ctx, &scripted{list: []Object{named}}, Stream{}, time.Hour, up)
		})
		if p, _ := s.r.Publications().View().Get(secret); p.Decision.Allow || p.Owner.Name != "secret" {
			t.Errorf("owner %q, decision %+v", p.Owner.Name, p.Decision)
		}
	})
}
