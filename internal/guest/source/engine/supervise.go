// SPDX-License-Identifier: Apache-2.0

// Package engine is what the sources of declared ports share: one session after
// another with an engine that comes and goes, warnings about an engine's bad data,
// and the facts by which a socket or a NAT rule gets its owner.
package engine

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http/httptrace"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/guest/registry"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/schedule"
)

// The defaults of Retry.
const (
	DefaultGrace    = 30 * time.Second
	DefaultMinDelay = 200 * time.Millisecond
	DefaultMaxDelay = 30 * time.Second
)

// For hurryFor after an engine was lost, or may be back, it is tried at least
// every hurryDelay, because it is probably starting.
const (
	hurryFor   = 30 * time.Second
	hurryDelay = time.Second
)

// absentDelay is between two tries where there is no trace of an engine. Wake
// notifies when one appears; the try is for what the kernel does not report, such
// as a mount that brings a socket.
const absentDelay = 5 * time.Minute

// forgetAfter is how long an engine of which there was a trace is expected to come back
// after nobody listens any more. Until then its source is stale, and ports that it may
// own wait for it where a rule names an owner.
const forgetAfter = 10 * time.Minute

// againPause is at least between the begins of two sessions, where the first one ended
// on purpose.
const againPause = time.Second

// jitter keeps agents that lost one server from trying in step.
const jitter = 0.25

// Retry is how often an engine that is gone is tried again, and how long what it
// declared outlives it. Zero means the default; a negative Grace never withdraws.
type Retry struct {
	Grace    time.Duration // from the loss of the engine until its ports are withdrawn
	MinDelay time.Duration // before the second try
	MaxDelay time.Duration // between two tries at most, without jitter
}

// WithDefaults fills in what is zero.
func (r Retry) WithDefaults() Retry {
	if r.Grace == 0 {
		r.Grace = DefaultGrace
	}
	if r.MinDelay == 0 {
		r.MinDelay = DefaultMinDelay
	}
	if r.MaxDelay == 0 {
		r.MaxDelay = DefaultMaxDelay
	}
	return r
}

// Validate returns an error that names the invalid field.
func (r Retry) Validate() error {
	if r.MinDelay < 0 || r.MaxDelay < 0 || r.MaxDelay > 0 && r.MaxDelay < r.MinDelay {
		return fmt.Errorf("retry delays %v to %v: want 0 (the default) or a positive range", r.MinDelay, r.MaxDelay)
	}
	return nil
}

// ErrAbsent is in the error of a session that found no trace of an engine: no
// socket, no configuration. An engine that never was there declares nothing,
// which is a complete set; one that was there and is lost is stale.
var ErrAbsent = errors.New("no engine yet")

// ErrUnused is in an [ErrAbsent] of a source that is one of several and is not needed now:
// there is nothing to say of it.
var ErrUnused = errors.New("not needed")

// ErrRefused is in the error of a session that found sockets or addresses, none of
// which anybody listens at: an engine is starting, or left its socket behind. It is also
// in that of one which may not use the configuration that it found.
var ErrRefused = errors.New("nobody listens")

// errAppeared is the state from the first trace of an engine to its first list.
var errAppeared = errors.New("the engine appeared and is not listed yet")

// ErrAgain is what a session returns that ended on purpose, to be run again at
// once: something changed, and nothing is stale by that.
var ErrAgain = errors.New("run the session again")

// ErrRest is what a session returns that ended because the engine runs no container: an
// engine that is started for each request need not run for nobody. Nothing is stale by that.
// The next session begins at a sign of a container.
var ErrRest = errors.New("no container runs")

// Session talks to an engine until it is lost, and returns why. It calls up after
// each complete set that it gave to the feed. It dials with values of its ctx, which
// has an [httptrace.ClientTrace] by which the supervisor notices a connection.
type Session func(ctx context.Context, up func()) error

// Supervisor runs one session after another.
type Supervisor struct {
	Retry  Retry
	Logger *slog.Logger
	Feed   registry.Feed
	// Facts are what the session names owners by, from which requests for a list come.
	// While there is no engine, each has it tried. May be nil.
	Facts *Table
	// Wake receives when the engine may be back; the next try is then at once. It
	// is nearly the only way to find an engine of which there is no trace.
	Wake <-chan struct{}
	// Signs receives when a container may have started while the engine rests (see
	// [ErrRest]). May be nil.
	Signs <-chan struct{}
	// Await is called while the supervisor waits for the next try, which is at once
	// when it returns nil. It ends with its ctx. May be nil.
	Await func(ctx context.Context) error
	// Withdraw takes back everything that was declared. It is called once for
	// each loss that outlasts the grace period, never during a session.
	Withdraw func()
	// Prune drops what Withdraw left and what is no longer true. It is called after
	// each failed session from then on. May be nil.
	Prune func()
	// Known says that an earlier agent knew the engine, and that something of it is
	// left: it is expected to come back, and Prune is called from the beginning.
	Known bool
}

// Run returns ctx's error when ctx ends, and never before. The registry logs
// the transitions between live and stale; a try that fails like the one before
// it logs nothing.
func (s Supervisor) Run(ctx context.Context, session Session) error {
	l := supervision{
		Supervisor: s, downSince: time.Now(), absence: absence{feed: s.Feed, asks: s.asks()}, expected: s.Known, left: s.Known,
		backoff: schedule.Backoff{Min: s.Retry.MinDelay, Max: s.Retry.MaxDelay, Jitter: jitter},
	}
	defer l.absence.clear() // a dial may outlive its session
	traced := l.absence.trace(ctx)
	for {
		began, isUp := time.Now(), false
		asked := l.absence.asks.peek()
		err := session(traced, func() {
			isUp, l.declared = true, true
			l.absence.clear()
		})
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if isUp {
			l.wasUp(began)
		}
		if errors.Is(err, ErrAgain) {
			if isUp {
				l.backoff.Reset()
			}
			if schedule.Sleep(ctx, againPause-time.Since(began)) != nil {
				return context.Cause(ctx)
			}
			continue
		}
		if errors.Is(err, ErrRest) {
			l.backoff.Reset()
			if err := l.rest(ctx); err != nil {
				return err
			}
			continue
		}
		if err == nil {
			err = errors.New("the session ended")
		}
		l.report(err)
		l.absence.answer(asked)
		if err := l.wait(ctx, err); err != nil {
			return err
		}
	}
}

// supervision is the state of one Run.
type supervision struct {
	Supervisor

	backoff   schedule.Backoff
	downSince time.Time
	declared  bool      // something may be declared that must be withdrawn
	withdrawn bool      // it was
	left      bool      // there may be something for Prune
	absence   absence   // it was reported that there is no engine
	expected  bool      // there was a trace of an engine, which is not forgotten
	goneSince time.Time // since when nobody listens, zero if somebody did at the last try
	hurry     time.Time // until then, tries are close together
}

// absence is the state in which there is no engine, and the source is live with an
// empty set. It ends at the first trace of an engine, because what that names is not
// known until it has been listed. Safe for concurrent use.
type absence struct {
	feed registry.Feed
	asks *asks
	mu   sync.Mutex
	on   bool
}

// asks returns the requests for lists.
func (s *Supervisor) asks() *asks {
	if s.Facts == nil {
		return new(asks)
	}
	return &s.Facts.asks
}

// answer answers requests that were made before the last try, if it found no engine.
func (a *absence) answer(asked []func()) {
	if !a.is() {
		return
	}
	a.asks.take(len(asked))
	for _, listed := range asked {
		listed()
	}
}

// begin reports that there is no engine, once.
func (a *absence) begin(err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.on {
		return
	}
	a.on = true
	a.asks.setAbsent(true)
	a.feed.Replace(nil)
	switch {
	case errors.Is(err, ErrUnused):
		a.feed.Method("")
	case errors.Is(err, registry.ErrUnusable):
		a.feed.Lacks(port.LackSettings, err.Error())
	case errors.Is(err, ErrAbsent):
		a.feed.Lacks(port.LackEngine, err.Error())
	default:
		a.feed.Method(err.Error())
	}
}

// end reports that there is an engine now, if it was reported that there is none.
func (a *absence) end() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.on {
		a.on = false
		a.asks.setAbsent(false)
		a.feed.Stale(errAppeared)
	}
}

// clear notes that another state was reported, or will be.
func (a *absence) clear() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.on = false
	a.asks.setAbsent(false)
}

func (a *absence) is() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.on
}

// trace returns a context whose dials end the absence when one succeeds.
func (a *absence) trace(ctx context.Context) context.Context {
	return httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{ConnectDone: func(_, _ string, err error) {
		if err == nil {
			a.end()
		}
	}})
}

// rest waits until a container may run, or somebody asks for a list.
func (l *supervision) rest(ctx context.Context) error {
	var why string
	select {
	case <-l.Wake:
		why = "its socket changed"
	case <-l.Signs:
		why = "a container may have started"
	case <-l.absence.asks.signal():
		why = "a port waits for its owner"
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	l.Logger.Debug("asking the engine that was left alone", "because", why)
	return nil
}

// wasUp notes the end of a session that reported a complete set.
func (l *supervision) wasUp(began time.Time) {
	l.withdrawn, l.left, l.expected, l.downSince, l.goneSince = false, false, true, time.Now(), time.Time{}
	// An engine that accepts and closes at once is no reason to hurry.
	if time.Since(began) >= l.Retry.MaxDelay/2 {
		l.backoff.Reset()
		l.hurry = l.downSince.Add(hurryFor)
	}
}

// report gives the state after a failed session to the feed.
func (l *supervision) report(err error) {
	if l.left && l.Prune != nil {
		l.Prune()
	}
	l.expect(err)
	if l.expected && !l.declared && !l.goneSince.IsZero() && time.Since(l.goneSince) >= forgetAfter {
		l.Logger.Info("the engine left no trace; forgetting it", "after", forgetAfter, "err", err)
		l.expected = false
	}
	if l.expected {
		l.absence.clear()
		l.stale(err)
		return
	}
	l.absence.begin(err)
}

// expect notes whether there is a trace of an engine, and since when nobody listens. A
// socket at which nobody listens is no trace of an engine that was forgotten.
func (l *supervision) expect(err error) {
	absent, refused := errors.Is(err, ErrAbsent), errors.Is(err, ErrRefused)
	switch {
	case !absent && !refused:
		l.expected, l.goneSince = true, time.Time{}
		return
	case refused && !l.absence.is():
		l.expected = true
	}
	if l.goneSince.IsZero() {
		l.goneSince = time.Now()
	}
}

func (l *supervision) stale(err error) {
	if l.withdrawn {
		err = fmt.Errorf("declared ports withdrawn after %v: %w", l.Retry.Grace, err)
	}
	l.Feed.Stale(err)
}

// wait returns when it is time for the next try, or ctx's cause. Meanwhile it
// withdraws what was declared when the grace period is over.
func (l *supervision) wait(ctx context.Context, cause error) error {
	retry := time.Now().Add(l.delay(cause))
	for {
		until, withdraw := retry, false
		if grace := l.downSince.Add(l.Retry.Grace); l.declared && l.Retry.Grace >= 0 && grace.Before(retry) {
			until, withdraw = grace, true
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		woken, err := l.sleep(ctx, until)
		switch {
		case err != nil:
			return context.Cause(ctx)
		case woken:
			// What appears is rarely ready in the same instant.
			l.backoff.Reset()
			l.hurry = time.Now().Add(hurryFor)
			l.absence.end()
			return nil
		case !withdraw:
			return nil
		}
		l.declared, l.withdrawn, l.left = false, true, true
		l.Logger.Info("grace period expired; withdrawing declared ports", "after", l.Retry.Grace, "err", cause)
		l.Withdraw()
		l.stale(cause)
	}
}

// sleep waits until a time, or for a request for a list if there is no engine. It
// reports whether the engine may be back.
func (l *supervision) sleep(ctx context.Context, until time.Time) (woken bool, err error) {
	timer := time.NewTimer(time.Until(until))
	defer timer.Stop()
	awaited, stop := l.await(ctx)
	defer stop()
	var asked schedule.Signal
	if l.absence.is() {
		asked = l.absence.asks.signal()
	}
	select {
	case <-timer.C:
		return false, nil
	case <-asked:
		return false, nil
	case <-l.Wake:
		return true, nil
	case <-awaited:
		return true, nil
	case <-ctx.Done():
		return false, ctx.Err()
	}
}

// await runs Await until stop is called, and closes the channel if it returned nil.
func (l *supervision) await(ctx context.Context) (awaited <-chan struct{}, stop func()) {
	if l.Await == nil {
		return nil, func() {}
	}
	ctx, cancel := context.WithCancel(ctx)
	c := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		if l.Await(ctx) == nil {
			close(c)
		}
	})
	return c, func() { cancel(); wg.Wait() }
}

// delay returns the pause before the next try.
func (l *supervision) delay(cause error) time.Duration {
	delay := l.backoff.Next()
	if time.Now().Before(l.hurry) {
		delay = min(delay, max(hurryDelay, l.Retry.MinDelay))
	}
	if errors.Is(cause, ErrAbsent) {
		// Trying does not help, and an idle machine must stay idle.
		delay = max(absentDelay, l.Retry.MaxDelay)
		l.backoff.Reset()
	}
	l.Logger.Debug("engine is not reachable", "err", cause, "retry", delay)
	return delay
}
