// SPDX-License-Identifier: Apache-2.0

// Package engine is what the sources of declared ports share: one session after
// another with an engine that comes and goes, what an engine says wrongly, and
// the facts by which a socket or a NAT rule gets its owner.
package engine

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"time"

	"github.com/fairlead/fairlead/internal/registry"
)

// The defaults of Retry.
const (
	DefaultGrace    = 30 * time.Second
	DefaultMinDelay = 200 * time.Millisecond
	DefaultMaxDelay = 30 * time.Second
)

// hurryFor is how long after an engine was lost, or may be back, it is tried at
// least every hurryDelay: it is starting then, more likely than not.
const (
	hurryFor   = 30 * time.Second
	hurryDelay = time.Second
)

// absentDelay is between two tries where there is no trace of an engine. Wake
// says when one appears; the try is for what the kernel does not tell, such as a
// mount that brings a socket.
const absentDelay = 5 * time.Minute

// Retry says how often an engine that is gone is tried again, and how long what
// it declared outlives it. Zero means the default; a negative Grace never withdraws.
type Retry struct {
	Grace    time.Duration // from the loss of the engine until its ports are withdrawn
	MinDelay time.Duration // before the second try
	MaxDelay time.Duration // between two tries at most
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

// Validate names the field that cannot be.
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

// ErrAgain is what a session returns that ended on purpose, to be run again at
// once: something changed, and nothing is stale by that.
var ErrAgain = errors.New("run the session again")

// Session talks to an engine until it is lost and says why. It calls up after
// each complete set that it gave to the feed.
type Session func(ctx context.Context, up func()) error

// Supervisor runs one session after another.
type Supervisor struct {
	Retry  Retry
	Logger *slog.Logger
	Feed   registry.Feed
	// Wake receives when the engine may be back; the next try is then at once. An
	// engine of which there is no trace is hardly looked for otherwise.
	Wake <-chan struct{}
	// Withdraw takes back everything that was declared. It is called once for
	// each loss that outlasts the grace period, never during a session.
	Withdraw func()
	// Jitter returns a number in [0,1); rand.Float64 if nil.
	Jitter func() float64
}

// Run returns ctx's error when ctx ends, and never before. The registry logs
// the transitions between live and stale; a try that fails like the one before
// it logs nothing.
func (s Supervisor) Run(ctx context.Context, session Session) error {
	if s.Jitter == nil {
		s.Jitter = rand.Float64
	}
	var (
		failures  int
		downSince = time.Now()
		declared  bool // something may stand that must be withdrawn
		withdrawn bool
		absent    bool // it was said that there is no engine
		everUp    bool
		hurry     time.Time // until then, tries are close together
	)
	for {
		began := time.Now()
		isUp := false
		err := session(ctx, func() { isUp, declared = true, true })
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if errors.Is(err, ErrAgain) {
			if isUp {
				failures, downSince, withdrawn, everUp = 0, time.Now(), false, true
			}
			continue
		}
		if err == nil {
			err = fmt.Errorf("the session ended")
		}
		if isUp {
			withdrawn, everUp = false, true
			downSince = time.Now()
			// An engine that accepts and drops at once is no reason to hurry.
			if time.Since(began) >= s.Retry.MaxDelay/2 {
				failures, hurry = 0, downSince.Add(hurryFor)
			}
		}
		if withdrawn {
			err = fmt.Errorf("declared ports withdrawn after %v: %w", s.Retry.Grace, err)
		}
		switch wasAbsent := absent; {
		case everUp || !errors.Is(err, ErrAbsent):
			absent = false
			s.Feed.Stale(err)
		case !wasAbsent:
			absent = true
			s.Feed.Replace(nil)
			s.Feed.Method(err.Error())
		}
		delay := s.delay(failures)
		if time.Now().Before(hurry) {
			delay = min(delay, max(hurryDelay, s.Retry.MinDelay))
		}
		failures++
		if errors.Is(err, ErrAbsent) {
			// Nothing is to be had by asking, and an idle machine stays idle.
			delay, failures = s.jittered(max(absentDelay, s.Retry.MaxDelay)), 0
		}
		s.Logger.Debug("engine is not reachable", "err", err, "failures", failures, "retry", delay)

		retry := time.NewTimer(delay)
		for waiting := true; waiting; {
			var grace <-chan time.Time
			var graceTimer *time.Timer
			if declared && s.Retry.Grace >= 0 {
				graceTimer = time.NewTimer(time.Until(downSince.Add(s.Retry.Grace)))
				grace = graceTimer.C
			}
			select {
			case <-ctx.Done():
			case <-retry.C:
				waiting = false
			case <-s.Wake:
				// What appears is rarely ready in the same instant.
				failures, waiting, hurry = 0, false, time.Now().Add(hurryFor)
			case <-grace:
				declared, withdrawn = false, true
				s.Logger.Info("engine stays away; its declared ports are withdrawn",
					"after", s.Retry.Grace, "err", err)
				s.Withdraw()
				s.Feed.Stale(fmt.Errorf("declared ports withdrawn after %v: %w", s.Retry.Grace, err))
			}
			if graceTimer != nil {
				graceTimer.Stop()
			}
			if ctx.Err() != nil {
				retry.Stop()
				return context.Cause(ctx)
			}
		}
		retry.Stop()
	}
}

// delay doubles with each failure up to the maximum, less up to a half by chance.
func (s Supervisor) delay(failures int) time.Duration {
	d := s.Retry.MaxDelay
	if failures < 16 && s.Retry.MinDelay<<failures < d {
		d = s.Retry.MinDelay << failures
	}
	return s.jittered(d)
}

func (s Supervisor) jittered(d time.Duration) time.Duration {
	return d - time.Duration(s.Jitter()*float64(d)/2)
}
