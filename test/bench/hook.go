// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/kernel"
	"github.com/fairlead/fairlead/internal/observer"
	"github.com/fairlead/fairlead/internal/schedule"
	"github.com/fairlead/fairlead/test/kit/netns"
)

const hookAdded = "added to listen() and close()"

// What the caller's namespace is to the observer.
const (
	hookUnwatched = "another namespace"
	hookBurst     = "observed, in a burst"
	hookIdle      = "observed, idle"
)

var hookModes = []string{hookUnwatched, hookBurst, hookIdle}

func hookPart() part {
	return part{"hook", "hook", []measure{{name: hookAdded, unit: "s", modes: hookModes}}, hooks}
}

// hooks measures turns with an observer and turns without it. The speed of a processor
// changes by more than an observer costs from one second to the next, so the observer
// runs in this process, where it can start and stop in a tenth of a second, and each
// turn is compared with those before and after.
func hooks(ctx context.Context, b *bench) {
	watched, other := must(netns.New()), must(netns.New())
	b.cleanup(func() { _, _ = watched.Close(), other.Close() })
	turn := func() map[string]time.Duration {
		return map[string]time.Duration{
			hookUnwatched: repeat(other, b.of(400, 400, 20), 0),
			hookBurst:     repeat(watched, b.of(400, 400, 20), 0),
			hookIdle:      repeat(watched, b.of(80, 80, 10), 300*time.Microsecond), // the observer sleeps again
		}
	}
	before, types := turn(), new(kernel.Types)
	rounds, lossy := b.of(100, 40, 1), 0
	for range rounds {
		var with map[string]time.Duration
		lost := b.observed(ctx, watched, types, func() { with = turn() })
		after := turn()
		if lost > 0 { // this turn does not count
			lossy++
		} else {
			for _, m := range hookModes {
				b.add(hookAdded, m, 0, (with[m] - (before[m]+after[m])/2).Seconds())
			}
		}
		before = after
	}
	if 10*lossy > rounds {
		check(fmt.Errorf("the observer lost events in %d of %d turns", lossy, rounds))
	}
}

// repeat calls listen and close in a namespace, with pauses before. It returns the tenth
// percentile of the CPU time, because any other load only adds time.
func repeat(in *netns.Space, times int, pause time.Duration) time.Duration {
	var spent []time.Duration
	inside(in, func() {
		for i := range times {
			// Without a sleep, because a cold cache is not the observer's cost.
			for until := time.Now().Add(pause); time.Now().Before(until); {
				continue
			}
			fd := must(unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0))
			err := unix.Bind(fd, &unix.SockaddrInet4{Port: 20_000 + i, Addr: [4]byte{127, 0, 0, 1}})
			began := threadTime()
			err = errors.Join(err, unix.Listen(fd, 1), unix.Close(fd))
			spent = append(spent, threadTime()-began)
			check(err)
		}
	})
	slices.Sort(spent)
	return spent[len(spent)/10]
}

// threadTime is the CPU time of the calling thread.
func threadTime() time.Duration {
	var t unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t)
	return time.Duration(t.Nano())
}

// observed runs f while a namespace is observed by events, and returns how many were
// lost.
func (b *bench) observed(ctx context.Context, in *netns.Space, types *kernel.Types, f func()) (lost uint64) {
	o := must(observer.New(observer.Options{Mode: observer.BPF, Types: types}))
	ctx, cancel := context.WithCancel(ctx)
	live, done := make(deaf, 1), make(chan error, 1)
	go func() { done <- in.Do(func() error { return o.Run(ctx, live) }) }()
	err := attempt(func() {
		select {
		case <-live:
			check(schedule.Sleep(ctx, 100*time.Millisecond)) // until it sleeps
		case err := <-done:
			done <- err
			check(errors.Join(errors.New("the observer has ended"), err))
		}
		for _, m := range o.Methods() {
			if m.Capability == observer.TCPListen {
				b.method(hookUnwatched, m.Name)
			}
		}
		f()
	})
	cancel()
	check(errors.Join(err, <-done))
	return o.Stats().Drops
}

// deaf is a handler that only notes that the observer runs.
type deaf chan struct{}

func (d deaf) Replace([]observer.Socket) {
	select {
	case d <- struct{}{}:
	default: // again, after a loss
	}
}

func (deaf) Methods([]kernel.Method) {}
func (deaf) Apply([]observer.Event)  {}
func (deaf) Stale(error)             {}
