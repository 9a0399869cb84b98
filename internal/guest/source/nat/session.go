// SPDX-License-Identifier: Apache-2.0

package nat

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/fairlead/fairlead/internal/guest/kernel"
	"github.com/fairlead/fairlead/internal/guest/netwatch"
	"github.com/fairlead/fairlead/internal/guest/registry"
	"github.com/fairlead/fairlead/internal/guest/source/nat/compile"
	"github.com/fairlead/fairlead/internal/guest/source/nat/ruleset"
	"github.com/fairlead/fairlead/internal/guest/source/nat/watch"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/schedule"
)

// system is the kernel as a session uses it.
type system interface {
	// Watch opens a stream of commits.
	Watch() (watch.Stream, error)
	// Generation returns the number of the last commit.
	Generation() (uint32, error)
	// Dump returns the nftables ruleset, or watch.ErrMoved.
	Dump(ctx context.Context) (*ruleset.Snapshot, error)
	// Rules returns the rules of a chain in their order. If a commit overtook the
	// reading, some may be missing, and the error is watch.ErrMoved.
	Rules(id ruleset.ChainID) ([]ruleset.Rule, error)
	// Exists reports whether there is a table.
	Exists(t ruleset.TableID) (bool, error)
	// LegacyTables reports which families have a legacy nat table.
	LegacyTables() (v4, v6 bool, err error)
	// Legacy returns the legacy nat table of one family.
	Legacy(v6 bool) (*ruleset.Table, error)
	// Network returns the links and routes.
	Network() (netwatch.Snapshot, error)
	// NetworkChanged receives after what Network returns has changed.
	NetworkChanged() <-chan struct{}
}

// task is something that a session does when its time has come.
type task uint8

const (
	applyCommits    task = iota // apply the commits that were received
	readOrder                   // read the chains whose order they left open
	dump                        // read the nftables ruleset
	audit                       // compare the model with a dump
	auditLegacy                 // read the legacy tables whatever was reported
	readLegacy                  // read the legacy tables
	checkGeneration             // ask whether there was a commit
	checkOwned                  // ask whether owned tables exist
	tasks
)

// The parts that a session reads. It knows nothing until it has read them all.
const (
	partHost = iota
	partNFT
	partLegacy
	parts
)

var partNames = [parts]string{"addresses", "nftables", "iptables-legacy"}

// session follows the ruleset through one life of the sockets. All its fields
// belong to the goroutine of run.
type session struct {
	s    *Source
	sys  system
	feed registry.Feed
	c    *compile.Compiler
	m    *compile.Mirror
	in   *commits
	wake <-chan struct{} // reports changes of legacy tables; nil if nothing does

	due    schedule.Deadlines[task]
	rested [tasks]time.Time // a task is not done again before
	load   load             // of applying commits
	retry  schedule.Backoff // after reads that failed

	legacyCost time.Duration // of reading, smoothed
	absent     bool          // the kernel has no nftables

	have   [parts]bool  // read since the start
	broken [parts]error // why the last reading failed
	known  bool         // feed has a complete set from this session
	stale  bool         // feed was told so
	half   bool         // the model has a part of a commit, until the next dump
	reads  int          // of the chains whose order is open
}

func newSession(s *Source, feed registry.Feed, c *compile.Compiler, sys system) *session {
	return &session{
		s: s, sys: sys, feed: feed, c: c, m: compile.NewMirror(c), in: newCommits(sys),
		retry: schedule.Backoff{Min: retryMin, Max: retryMax},
	}
}

// plan plans a task for as soon as its pause allows.
func (x *session) plan(t task) {
	at := time.Now()
	if x.rested[t].After(at) {
		at = x.rested[t]
	}
	x.due.Advance(t, at)
}

func (x *session) planned(t task) bool { return !x.due.At(t).IsZero() }

// run keeps feed equal to the ruleset until ctx ends (nil) or a socket breaks.
func (x *session) run(ctx context.Context) error {
	defer x.in.close()
	if err := x.begin(); err != nil {
		return err
	}
	if w := x.s.opt.Wake; w != nil {
		x.wake = w.LegacyChanged()
	}
	x.sayMethod()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		x.work(ctx)
		timer.Reset(max(time.Until(x.due.Next()), 0))
		select {
		case <-ctx.Done():
			return nil
		case b := <-x.in.events:
			if err := x.takeAll(b); err != nil {
				return err
			}
		case <-x.sys.NetworkChanged():
			x.readHost()
		case _, ok := <-x.wake:
			if !ok {
				x.wake = nil
				x.sayMethod()
			}
			x.plan(readLegacy)
		case <-timer.C:
		}
	}
}

// begin chooses a method and plans the first readings.
func (x *session) begin() error {
	if err := x.watch(); err != nil {
		return err
	}
	now := time.Now()
	x.due.Set(audit, now.Add(x.s.opt.Audit))
	x.due.Set(auditLegacy, now.Add(x.s.opt.Audit))
	x.plan(dump)
	x.plan(readLegacy)
	x.pollGeneration(now)
	return nil
}

// watch chooses a method.
func (x *session) watch() error {
	err := x.in.use(x.s.opt.Methods)
	if x.in.method == "" {
		return fmt.Errorf("watch nftables: %w", err)
	}
	x.m.Filtered = x.in.filtered()
	x.s.logMethod(x.in.method, err)
	return nil
}

// logMethod logs the method in use if it is another than the last one.
func (s *Source) logMethod(method string, better error) {
	if method != s.method {
		s.method = method
		s.mu.Lock()
		s.status.Method = method
		s.mu.Unlock()
		s.log.Info("watching nftables", kernel.Method{Name: method, Err: better}.LogAttr())
	}
}

// sayMethod states how changes are learned.
func (x *session) sayMethod() {
	nftables, legacy := x.in.method, "legacy poll "+x.s.opt.LegacyPoll.String()
	if x.in.polled() {
		nftables = "generation poll " + generationPoll.String()
	}
	if x.wake != nil {
		legacy = "legacy " + x.s.opt.Wake.Method()
	}
	x.feed.Method(nftables + ", " + legacy)
}

// takeAll takes a batch and what else was received by now, to apply it together.
func (x *session) takeAll(b batch) error {
	for {
		if err := x.take(b); err != nil {
			return err
		}
		select {
		case b = <-x.in.events:
		default:
			return nil
		}
	}
}

// take takes what a stream received.
func (x *session) take(b batch) error {
	switch {
	case b.err == nil:
	case errors.Is(b.err, watch.ErrLost):
		x.lost(b.err)
		return nil
	default:
		return fmt.Errorf("watch nftables: %w", b.err)
	}
	if x.planned(dump) {
		// The dump will have all that was received before it. A commit that is not
		// complete yet is recognised by its generation.
		x.in.drop()
	}
	if err := x.in.add(b.msgs); err != nil {
		x.lost(err)
		return nil
	}
	switch {
	case len(x.in.pending) == 0 || x.planned(dump):
	case x.absent:
		x.plan(dump)
	default:
		x.plan(applyCommits)
	}
	return nil
}

// lost is called when notifications are missing or do not fit the model.
func (x *session) lost(err error) {
	x.s.log.Info("reading the nftables ruleset again", "err", err)
	x.count(func(st *Status) { st.Lost++ })
	x.dumpInstead()
}

// dumpInstead replaces the commits that were received by a dump.
func (x *session) dumpInstead() {
	x.in.drop()
	x.due.Cancel(applyCommits)
	x.due.Cancel(readOrder)
	x.plan(dump)
}

func (x *session) count(f func(*Status)) {
	x.s.mu.Lock()
	defer x.s.mu.Unlock()
	f(&x.s.status)
}

// fail keeps the current state and states why it may be out of date. It returns
// when to try again.
func (x *session) fail(part int, err error) time.Time {
	x.count(func(st *Status) { st.Failures++ })
	x.broken[part] = fmt.Errorf("read %s: %w", partNames[part], err)
	x.stale = true
	x.feed.Stale(errors.Join(x.broken[:]...))
	return time.Now().Add(x.retry.Next())
}

// settled reports whether the model is the ruleset of some time. It is not while it
// has a part of a commit or while the order of rules is open.
func (x *session) settled() bool { return !x.half && len(x.m.Unordered()) == 0 }

// done states what is known after a part was read.
func (x *session) done(part int) {
	x.have[part], x.broken[part] = true, nil
	if x.settled() { // else it is stated with the rest
		x.commit()
	}
}

// commit works out and states what has changed in the model.
func (x *session) commit() {
	ch := x.c.Commit()
	if x.c.Incomplete() {
		// A set that no packet met until now: read it before anything is stated.
		x.known, x.have[partNFT] = false, false
		x.plan(dump)
		return
	}
	x.state(ch)
}

// state states a change of the model, or the whole set if that was not known.
func (x *session) state(ch port.Change) {
	switch {
	case x.have != [parts]bool{true, true, true}:
	case !x.known || x.stale && errors.Join(x.broken[:]...) == nil:
		x.known, x.stale = true, false
		x.retry.Reset()
		x.updateStatus()
		x.feed.Replace(x.c.Bindings())
	default:
		x.publish(ch)
	}
}

// publish states a change.
func (x *session) publish(ch port.Change) {
	if !x.known {
		return
	}
	x.updateStatus()
	if len(ch.Put)+len(ch.Drop) > 0 {
		x.feed.Apply(ch)
	}
}

// maxProblems bounds the problems that the status holds.
const maxProblems = 1000

func (x *session) updateStatus() {
	var problems []Problem
	var all int
	fresh := x.c.ProblemsChanged()
	if fresh {
		problems, all = x.c.Problems(maxProblems)
	}
	published, evaluated := x.c.Counts()
	x.count(func(st *Status) {
		if fresh {
			st.Problems, st.ProblemCount = problems, all
		}
		st.Published, st.Evaluated = published, uint64(evaluated)
	})
	if fresh {
		x.s.opt.Problems.Notify()
	}
}
