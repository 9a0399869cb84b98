// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/guest/registry"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/schedule"
)

// lookers is how many containers are looked at at once.
const lookers = 4

// Object is all that is known of one running container.
type Object struct {
	ID       string // unique at its engine
	Bindings []port.Binding
	Warnings []string // bad data that is ignored
	Fact     Fact
	// Partial marks an incomplete object of a list: its fact lacks the cgroup, and a
	// look follows.
	Partial bool
	// Unsure marks a container of which the engine does not know whether it runs.
	// What is known of it is kept, and a look follows. Only the ID and the fact are
	// set, and maybe warnings: a fact opens nothing, and names what the container has opened.
	Unsure bool
}

// Engine fetches. Its methods are called from several goroutines.
type Engine interface {
	// List returns every running container, or an error and nothing.
	List(ctx context.Context) ([]Object, error)
	// Starting returns the IDs of containers that do not run and may be starting, so that their
	// ports may be open already. A look takes until such a one runs, or finds that it does not.
	Starting(ctx context.Context) (ids []string, err error)
	// Look returns one container; found is false if it is not running or not
	// there. An error means that the connection is of no use.
	Look(ctx context.Context, id string) (o Object, found bool, err error)
}

// Event is that something happened to a container.
type Event struct {
	ID   string
	Gone bool // it ended; otherwise it is looked at
	// At is when it happened, by the clock of this machine; zero if not known.
	At time.Time
}

// Stream is a subscription to events. It was made before the first list.
type Stream struct {
	Events <-chan Event
	// Failed yields why the stream ended, once.
	Failed <-chan error
	// Unconfirmed is set where the engine does not confirm the subscription, so
	// that a second list has to follow the first one.
	Unconfirmed bool
	// Stopped is set where a look returns containers that have stopped as well.
	Stopped bool
	// Rest is after how long without a running container the engine is left alone, 0 for
	// never. Following ends with [ErrRest] then.
	Rest time.Duration
	// Signs receives when a container may have started, which begins that time anew. May
	// be nil.
	Signs <-chan struct{}
	// Awake reports whether the engine is needed although nothing runs. May be nil.
	Awake func() bool
}

// confirmAfter is when an unconfirmed subscription is assumed to be in place.
const confirmAfter = time.Second

// unsureFor is the time until a container is looked at again of which the engine
// could not tell whether it runs. It doubles, up to maxUnsureFor.
const (
	unsureFor    = time.Second
	maxUnsureFor = 30 * time.Second
)

// slowLook is how long the look at a container of which nothing is known may take
// until a list is asked for, which names it: a rule by owner waits 10 seconds at most.
const slowLook = time.Second

// Set is everything that a source reports. It outlives sessions, so that it can be
// compared or withdrawn after the engine is lost. One goroutine uses it.
type Set struct {
	Logger   *slog.Logger
	Feed     registry.Feed
	Facts    *Table
	Warnings Warnings
	Host     Host

	known   map[string]reported
	drift   int
	pruneAt time.Time // not before
}

// reported is what was reported of one container.
type reported struct {
	bindings []port.Binding
	asOf     time.Time // when it was asked for
	looked   bool      // all of it, also its cgroup if that can be seen, was asked for
}

// NewSet returns an empty set.
func NewSet(logger *slog.Logger, feed registry.Feed, facts *Table, host Host) *Set {
	return &Set{
		Logger: logger, Feed: feed, Facts: facts, known: make(map[string]reported),
		Warnings: Warnings{Feed: feed}, Host: host,
	}
}

// Withdraw takes everything back but the facts of containers that still run: their
// ports remain open in the kernel, and rules may deny them by owner.
func (s *Set) Withdraw() {
	var c port.Change
	for _, k := range s.known {
		for _, b := range k.bindings {
			c.Drop = append(c.Drop, b.Origin)
		}
	}
	clear(s.known)
	s.prune()
	s.Warnings.Clear()
	s.Feed.Apply(c)
}

// pruneShare is the part of the time that Prune takes at most: one in so many.
const pruneShare = 200

// Prune forgets the facts of containers that no longer run, without asking the engine.
// It does nothing while too much time was spent on that.
func (s *Set) Prune() {
	if time.Now().Before(s.pruneAt) {
		return
	}
	s.prune()
}

func (s *Set) prune() {
	began := time.Now()
	runs := s.Host.running(s.Facts.all())
	s.Facts.Retain(func(_ string, f Fact) bool { return runs(f) })
	now := time.Now()
	s.pruneAt = now.Add(schedule.Rest(now.Sub(began), pruneShare))
}

// Follow lists, and applies what happens until something fails or ctx ends. It
// calls up after each list. audit is the time between two lists.
func (s *Set) Follow(ctx context.Context, e Engine, st Stream, audit time.Duration, up func()) error {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	f := &follower{
		Set: s, e: e, up: up, list: true, full: true,
		last: make(map[string]uint64), dirty: make(map[string]bool), unsure: make(map[string]bool),
		looks: make(map[string]time.Time), pause: schedule.Backoff{Min: unsureFor, Max: maxUnsureFor},
		jobs: make(chan look), lists: make(chan look), done: make(chan look),
		stopped: st.Stopped,
	}
	asked := s.Facts.asks.signal()
	for range lookers {
		wg.Go(func() { f.work(ctx, f.jobs) })
	}
	wg.Go(func() { f.work(ctx, f.lists) })
	next := audit
	if st.Unconfirmed {
		next = confirmAfter
	}
	timer := time.NewTimer(next)
	defer timer.Stop()
	var rest <-chan time.Time
	for {
		switch idle := f.idle(st); {
		case !idle:
			rest = nil
		case rest == nil:
			rest = time.After(st.Rest)
		}
		job, jobs := f.next()
		list, lists := f.nextList()
		select {
		case jobs <- job:
			f.began(job)
		case lists <- list:
			f.began(list)
		case <-rest:
			return ErrRest
		case <-st.Signs:
			rest = nil
		case <-f.slow:
			f.lookIsSlow()
		case ev := <-st.Events:
			f.event(ev)
		case err := <-st.Failed:
			return fmt.Errorf("events: %w", err)
		case l := <-f.done:
			if err := f.apply(l); err != nil {
				return err
			}
		case <-asked:
			f.list = f.list || len(s.Facts.asks.peek()) > 0
		case <-timer.C:
			f.list, f.full = true, true
			timer.Reset(audit)
		case <-f.again:
			f.again = nil
			for id, again := range f.unsure {
				if again {
					f.unsure[id] = false
					f.mark(id)
				}
			}
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// idle reports whether nothing runs, and nobody asks what does.
func (f *follower) idle(st Stream) bool {
	return st.Rest > 0 && f.live && len(f.known)+len(f.dirty)+len(f.confirming) == 0 && !f.list && !f.await &&
		!(st.Awake != nil && st.Awake())
}

// look is a question to the engine and its answer.
type look struct {
	id     string // "" for a list
	seq    uint64 // of the last event before it began
	began  time.Time
	full   bool     // each container of the list is looked at
	listed []func() // requests that the list answers
	all    []Object
	starts []string // containers that may be starting, of a list that answers requests
	object Object
	found  bool
	err    error
}

// follower is one connection's worth of work: events come in, looks go out, and
// what they bring is applied in one goroutine.
type follower struct {
	*Set
	e    Engine
	up   func()
	live bool // the first list has been applied

	seq   uint64            // counts events
	last  map[string]uint64 // seq of the last event by container, while looks are under way
	busy  int               // looks under way
	queue []string          // containers to look at
	spare []string          // those that are looked at when queue is empty
	// dirty holds what is queued (true), or being looked at (false, or true if
	// something happened meanwhile and another look has to follow).
	dirty map[string]bool
	list  bool // a list is wanted
	full  bool // one after which each container is looked at
	await bool // a list is under way

	confirming []confirming // requests that lists have answered, but not all looks

	// unsure holds the containers of which the engine could not tell whether they run:
	// true for those to look at again.
	unsure map[string]bool
	again  <-chan time.Time // when; nil if there are none
	pause  schedule.Backoff // until then

	looks map[string]time.Time // when looks at containers that are not known began
	slow  <-chan time.Time     // when the first of these is slow; nil if there are none

	stopped bool // see Stream
	jobs    chan look
	lists   chan look
	done    chan look
}

// next returns the look to hand out, if there is any.
func (f *follower) next() (look, chan<- look) {
	if len(f.queue) == 0 && len(f.spare) > 0 {
		f.queue, f.spare = append(f.queue, f.spare[0]), f.spare[1:]
	}
	if len(f.queue) > 0 {
		return look{id: f.queue[0], seq: f.seq, began: time.Now()}, f.jobs
	}
	return look{}, nil
}

// nextList is next for a list. Looks that the engine does not answer do not delay it.
func (f *follower) nextList() (look, chan<- look) {
	if f.list && !f.await {
		return look{seq: f.seq, began: time.Now(), full: f.full, listed: f.Facts.asks.peek()}, f.lists
	}
	return look{}, nil
}

func (f *follower) began(l look) {
	f.busy++
	if l.id == "" {
		f.list, f.full, f.await = false, f.full && !l.full, true
		f.Facts.asks.take(len(l.listed))
		return
	}
	f.queue = f.queue[1:]
	f.dirty[l.id] = false
	if _, known := f.known[l.id]; !known {
		f.looks[l.id] = l.began
		f.watchLooks()
	}
}

// watchLooks has lookIsSlow called when a look is.
func (f *follower) watchLooks() {
	if f.slow == nil && len(f.looks) > 0 {
		f.slow = time.After(slowLook)
	}
}

// lookIsSlow asks for a list if a look at a container that is not known is slow.
func (f *follower) lookIsSlow() {
	f.slow = nil
	for id, began := range f.looks {
		if time.Since(began) >= slowLook {
			f.list = true
			delete(f.looks, id) // once
		}
	}
	f.watchLooks()
}

// mark has a container looked at.
func (f *follower) mark(id string) {
	again, known := f.dirty[id]
	if again && len(f.spare) > 0 {
		before := len(f.spare)
		f.spare = slices.DeleteFunc(f.spare, func(s string) bool { return s == id })
		known = len(f.spare) == before
	}
	if f.dirty[id] = true; !known {
		f.queue = append(f.queue, id)
	}
}

// markSpare has a container looked at after all others: there may be many that do not run.
func (f *follower) markSpare(id string) {
	if _, known := f.dirty[id]; !known {
		f.spare = append(f.spare, id)
	}
	f.dirty[id] = true
}

// later has a container looked at again in a moment, and names what it has opened.
func (f *follower) later(o Object) {
	if _, again := f.unsure[o.ID]; !again {
		f.pause.Reset()
	}
	f.unsure[o.ID] = true
	if len(o.Warnings) > 0 {
		f.Warnings.Set(o.ID, o.Warnings)
	}
	if f.again == nil {
		f.again = time.After(f.pause.Next())
	}
	if _, had := f.Facts.Fact(o.ID); !had && o.Fact.Owner.Kind != port.OwnerUnknown {
		f.Facts.Put(o.ID, o.Fact)
	}
}

func (f *follower) event(ev Event) {
	if ev.ID == "" {
		return
	}
	f.seq++
	if f.busy > 0 {
		f.last[ev.ID] = f.seq
	}
	if !ev.Gone {
		f.mark(ev.ID)
		return
	}
	// Nothing is asked: there may be nobody left to answer.
	if k, ok := f.known[ev.ID]; ok {
		if !ev.At.IsZero() && ev.At.Before(k.asOf) {
			// It was seen alive since: history, or it was started again.
			f.mark(ev.ID)
			return
		}
		f.drop(ev.ID)
	}
	if _, looking := f.dirty[ev.ID]; looking || f.stopped {
		f.mark(ev.ID)
	}
}

// apply takes in an answer.
func (f *follower) apply(l look) error {
	f.busy--
	delete(f.looks, l.id)
	defer func() {
		if f.busy == 0 {
			clear(f.last)
		}
	}()
	if l.id == "" {
		f.await = false
		if l.err == nil {
			f.replace(l)
			f.answer(l)
		}
		return l.err
	}
	if f.dirty[l.id] {
		f.queue = append(f.queue, l.id)
		return nil
	}
	delete(f.dirty, l.id)
	defer f.confirmed(l.id)
	if l.err == nil && l.found && l.object.Unsure {
		f.later(l.object)
		return nil
	}
	delete(f.unsure, l.id)
	switch {
	case l.err != nil:
		return l.err
	case l.found:
		f.put(l.object, l.began)
	default:
		f.drop(l.id)
	}
	return nil
}

// put reports one container.
func (f *follower) put(o Object, asOf time.Time) {
	var c port.Change
	for _, b := range f.known[o.ID].bindings {
		if !slices.ContainsFunc(o.Bindings, func(n port.Binding) bool { return n.Origin == b.Origin }) {
			c.Drop = append(c.Drop, b.Origin)
		}
	}
	c.Put = o.Bindings
	f.keep(o, asOf, f.known)
	if f.live && len(c.Drop)+len(c.Put) > 0 {
		f.Feed.Apply(c)
	}
}

// keep records a container, without reporting it to the feed.
func (f *follower) keep(o Object, asOf time.Time, in map[string]reported) {
	in[o.ID] = reported{o.Bindings, asOf, !o.Partial || f.known[o.ID].looked}
	f.Warnings.Set(o.ID, o.Warnings)
	if !o.Partial {
		f.Facts.Put(o.ID, o.Fact)
		return
	}
	if o.Fact.Owner.Kind == port.OwnerUnknown {
		return // the list has it no better than before
	}
	if old, had := f.Facts.Fact(o.ID); had {
		o.Fact.Path, o.Fact.Cgroup = old.Path, old.Cgroup
	}
	f.Facts.Put(o.ID, o.Fact)
}

// drop reports that a container is gone.
func (f *follower) drop(id string) {
	var c port.Change
	for _, b := range f.known[id].bindings {
		c.Drop = append(c.Drop, b.Origin)
	}
	delete(f.known, id)
	f.Facts.Remove(id)
	f.Warnings.Set(id, nil)
	if f.live && len(c.Drop) > 0 {
		f.Feed.Apply(c)
	}
}

// replace makes the set equal to a list, save for containers of which there is
// newer word: they are looked at.
func (f *follower) replace(l look) {
	next := make(map[string]reported, len(l.all))
	drift := 0
	for _, o := range l.all {
		old, had := f.known[o.ID]
		if newer := f.last[o.ID] > l.seq; newer || o.Unsure {
			if newer {
				f.mark(o.ID)
			} else {
				f.later(o)
			}
			if had || !newer {
				next[o.ID] = old
			}
			continue
		}
		_, looking := f.dirty[o.ID]
		same := slices.EqualFunc(old.bindings, o.Bindings, sameBinding)
		if !looking && !same {
			drift++
		}
		f.keep(o, l.began, next)
		if o.Partial && !looking && (l.full || !same || !old.looked) {
			f.mark(o.ID)
		}
	}
	for id, old := range f.known {
		if _, stays := next[id]; stays {
			continue
		}
		if f.last[id] > l.seq {
			next[id] = old
			f.mark(id)
			continue
		}
		if len(old.bindings) > 0 {
			drift++
		}
		f.Warnings.Set(id, nil)
	}
	if f.live && drift > 0 {
		f.drift += drift
		log := f.Logger.Warn
		if !l.full { // it was asked for while something changed, and may be ahead of events
			log = f.Logger.Debug
		}
		log("a list differed from what events had reported; repaired", "containers", drift, "total", f.drift)
	}
	f.known = next
	f.Facts.Retain(func(id string, _ Fact) bool { _, ok := next[id]; return ok })
	var set []port.Binding
	for _, k := range next {
		set = append(set, k.bindings...)
	}
	// Two containers may claim one origin only by an engine's mistake; the order
	// must not depend on a map then.
	slices.SortFunc(set, func(a, b port.Binding) int { return cmp.Compare(a.Origin.ID, b.Origin.ID) })
	f.live = true
	f.Feed.Replace(set)
	f.up()
}

func sameBinding(a, b port.Binding) bool {
	return a.Key == b.Key && a.Origin == b.Origin && a.Mapped == b.Mapped && a.Detail.Equal(b.Detail) &&
		slices.Equal(a.Dial, b.Dial) && a.Owner.Equal(b.Owner)
}

// work asks what is handed out, until ctx ends.
func (f *follower) work(ctx context.Context, jobs <-chan look) {
	for {
		select {
		case <-ctx.Done():
			return
		case l := <-jobs:
			if l.id == "" {
				l.list(ctx, f.e)
			} else {
				l.object, l.found, l.err = f.e.Look(ctx, l.id)
			}
			select {
			case f.done <- l:
			case <-ctx.Done():
				return
			}
		}
	}
}

// list makes a list. What has started while it is made is in its second part.
func (l *look) list(ctx context.Context, e Engine) {
	if len(l.listed) > 0 {
		l.starts, l.err = e.Starting(ctx)
	}
	if l.err == nil {
		l.all, l.err = e.List(ctx)
	}
}
