// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/fairlead/fairlead/internal/kernel"
	"github.com/fairlead/fairlead/internal/observer"
	"github.com/fairlead/fairlead/test/bench/report"
	"github.com/fairlead/fairlead/test/kit/netns"
)

// settling is what an observer is given after its first dump, to sleep.
const settling = 100 * time.Millisecond

// hookTurns measures what observing adds to pairs that follow each other, in a
// namespace that is observed and in another one. A processor's speed changes by
// more than that from one second to the next, so the observer runs in this
// process, where it is there and gone in a tenth of a second, and each turn with
// it is compared with those without it before and after.
func hookTurns(ctx context.Context, e *Env, cases []hookCase) error {
	watched, err := netns.New()
	if err != nil {
		return err
	}
	defer func() { _ = watched.Close() }()
	other, err := netns.New()
	if err != nil {
		return err
	}
	defer func() { _ = other.Close() }()

	without := func() (out []time.Duration, err error) {
		for _, c := range cases {
			d, err := repeat(watched, c.pair, c.n, 0)
			if err != nil {
				return nil, err
			}
			out = append(out, d)
		}
		return out, nil
	}
	types := new(kernel.Types)
	added := map[[2]string][]float64{}
	before, err := without()
	if err != nil {
		return err
	}
	by, rounds, lossy := "", e.Of(100, 60, 1), 0
	for range rounds {
		with := map[[2]string]time.Duration{}
		var lost uint64
		by, lost, err = observed(ctx, watched, types, func() error {
			for _, c := range cases {
				for mode, in := range map[string]*netns.Space{hookUnwatched: other, hookBurst: watched} {
					if with[[2]string{c.name, mode}], err = repeat(in, c.pair, c.n, 0); err != nil {
						return err
					}
				}
			}
			return nil
		})
		if err != nil {
			return err
		}
		after, err := without()
		if err != nil {
			return err
		}
		if lost > 0 {
			if lossy++; 10*lossy > rounds {
				return fmt.Errorf("the agent lost %d events, and some in %d of %d turns", lost, lossy, rounds)
			}
			before = after
			continue
		}
		for i, c := range cases {
			for _, mode := range []string{hookUnwatched, hookBurst} {
				key := [2]string{c.name, mode}
				added[key] = append(added[key], (with[key] - (before[i]+after[i])/2).Seconds())
			}
		}
		before = after
	}
	for _, c := range cases {
		for _, mode := range []string{hookUnwatched, hookBurst} {
			s := added[[2]string{c.name, mode}]
			e.Samples(report.Cell{
				Measure: addedTo(c.name), Mode: mode, Unit: "s", By: by,
				Extra: map[string]float64{"p50 is sure to ± ns": 1e9 * sure(s)},
			}, s)
		}
	}
	return nil
}

// observed runs f while an observer that tells nobody observes a namespace by
// events, and says by which, and how many of them were lost.
func observed(ctx context.Context, in *netns.Space, types *kernel.Types, f func() error) (by string, lost uint64, err error) {
	o, err := observer.New(observer.Options{Mode: observer.BPF, Types: types})
	if err != nil {
		return "", 0, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	live, done := make(chan struct{}), make(chan error, 1)
	go func() {
		done <- in.Do(func() error { return o.Run(ctx, deaf{live}) })
	}()
	select {
	case <-live:
		err = pause(ctx, settling)
	case err = <-done:
		return "", 0, errors.Join(errors.New("the observer has ended"), err)
	}
	for _, r := range o.Methods() {
		if r.Capability == observer.TCPListen {
			by = r.Name
		}
	}
	if err == nil {
		err = f()
	}
	cancel()
	err = errors.Join(err, <-done)
	return by, o.Stats().Drops, err
}

// deaf is an observer's handler that only says that it runs.
type deaf struct{ live chan struct{} }

func (d deaf) Replace([]observer.Socket) {
	select {
	case <-d.live: // after a loss
	default:
		close(d.live)
	}
}

func (deaf) Methods([]kernel.Method) {}
func (deaf) Apply([]observer.Event)  {}
func (deaf) Stale(error)             {}

// sure is half the width of the interval that holds the median of what the
// samples are of, 95 times of 100 (by order statistics).
func sure(samples []float64) float64 {
	s := slices.Sorted(slices.Values(samples))
	n := float64(len(s))
	low := max(int(n/2-math.Sqrt(n)), 0)
	high := min(int(n/2+math.Sqrt(n)), len(s)-1)
	return (s[high] - s[low]) / 2
}
