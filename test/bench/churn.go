// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/test/bench/report"
)

// The measures of changes.
const (
	churnCPU  = "CPU time for each change"
	churnWake = "context switches of the agent for each change"
	churnDone = "last change → the other end of the link has it all"

	burstDone = "burst: last listener opened → all are at the other end of the link"
	burstCPU  = "burst: CPU time in all"
	burstRSS  = "burst: memory afterwards (RSS)"

	udpCPU = "200 short-lived UDP binds a second beside 1,000 listeners: CPU"
)

func churnPart() Part {
	return Part{
		Section: report.Section{
			Name: "churn", Title: "What it costs while much happens",
			About: `Listeners are opened and closed at a steady rate, a hundred of them standing at any time (one change is one
of either). Then a burst: thousands of listeners as fast as one thread opens them, to an agent that was
just started. Then UDP sockets that are bound and closed 5 ms later beside 1,000 listeners, after two seconds of the
same, as who meets so many of them for the first time tells the first of them. CPU is the agent's alone; an event mode that lost a single event fails.`,
			Figures: []report.Figure{
				{File: "churn-cpu", Title: "CPU time for each change", Measure: churnCPU, Kind: report.Lines, X: "changes per second", Y: "CPU", LogX: true, LogY: true},
				{File: "burst", Title: "From the last of a burst until all are told", Measure: burstDone, Kind: report.Bars, X: "listeners", Y: "time", LogY: true},
			},
		},
		Run: func(ctx context.Context, e *Env) error {
			return errors.Join(churn(ctx, e), bursts(ctx, e), udpBinds(ctx, e))
		},
	}
}

// churned is what one mode did at one rate.
type churned struct {
	changes  int
	cpu      time.Duration
	switches int
	done     []float64
	err      error
}

func churn(ctx context.Context, e *Env) error {
	ls, errs := linkedModes(ctx, e, 0)
	defer closeAll(ls)
	if err := pause(ctx, 3*time.Second); err != nil { // what the start left to do
		return err
	}
	for _, r := range []struct {
		rate  int
		lasts time.Duration
		alone bool // too much to be done to all modes at the same time
	}{
		{1, e.For(12*time.Second, 6*time.Second, time.Second), false},
		{100, e.For(5*time.Second, 3*time.Second, time.Second), false},
		{10_000, e.For(3*time.Second, 2*time.Second, 500*time.Millisecond), true},
	} {
		all := make([]churned, len(modes))
		for i := range all {
			all[i].err = errs[i]
		}
		rounds := e.Of(2, 1, 1)
		if r.alone {
			rounds = e.Of(3, 2, 1)
		}
		for range rounds {
			var wg sync.WaitGroup
			for i, l := range ls {
				if all[i].err != nil {
					continue
				}
				one := func() { all[i].one(ctx, l, r.rate, r.lasts) }
				if r.alone {
					one()
				} else {
					wg.Go(one)
				}
			}
			wg.Wait()
			if ctx.Err() != nil {
				return ctx.Err()
			}
		}
		for i, m := range modes {
			c := report.Cell{Measure: churnCPU, Mode: m.name, Size: float64(r.rate), SizeUnit: "changes per second", Unit: "s"}
			done, wake := c, c
			done.Measure, wake.Measure, wake.Unit = churnDone, churnWake, ""
			if all[i].err == nil {
				all[i].err = ls[i].check(ctx)
			}
			if err := all[i].err; err != nil {
				e.Fail(c, err)
				e.Fail(wake, err)
				e.Fail(done, err)
				continue
			}
			c.By, done.By, wake.By = ls[i].by, ls[i].by, ls[i].by
			e.Value(c, all[i].cpu.Seconds()/float64(all[i].changes))
			e.Value(wake, float64(all[i].switches)/float64(all[i].changes))
			e.Samples(done, all[i].done)
		}
	}
	return nil
}

// one makes changes at a rate, and waits until the other end is in step.
func (c *churned) one(ctx context.Context, l *linked, rate int, lasts time.Duration) {
	before, err := l.used()
	if err != nil {
		c.err = err
		return
	}
	n, ended, standing, err := change(ctx, l, rate, lasts)
	defer standing.close()
	if err != nil {
		c.err = err
		return
	}
	last, err := l.peer.converged(ctx, standing.ports)
	if err != nil {
		c.err = err
		return
	}
	after, err := l.used()
	if err != nil {
		c.err = err
		return
	}
	c.changes += n
	c.cpu += after.cpu - before.cpu
	c.switches += after.switches - before.switches
	c.done = append(c.done, max(last.Sub(ended), 0).Seconds())
	standing.close()
	_, c.err = l.peer.settled(ctx, 0)
}

// standing are the listeners that are open, oldest first.
type standing struct {
	fds   sockets
	ports []uint16
}

func (s *standing) close() {
	s.fds.close()
	s.fds = nil
}

// change opens and closes listeners at a rate: a hundred stand, the oldest of
// which goes when another comes. It returns when the last change was made.
func change(ctx context.Context, l *linked, rate int, lasts time.Duration) (n int, ended time.Time, s *standing, err error) {
	s = &standing{}
	err = l.space.Do(func() error {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		next := 0
		begin := time.Now()
		total := max(1, int(float64(rate)*lasts.Seconds()))
		for n < total && ctx.Err() == nil {
			// Due changes are made together each millisecond, not one after each sleep.
			due := min(total, 1+int(float64(rate)*time.Since(begin).Seconds()))
			for ; n < due; n++ {
				if len(s.fds) > 100 || n%2 == 1 && rate < 100 && len(s.fds) > 0 {
					if err := unix.Close(s.fds[0]); err != nil {
						return err
					}
					s.fds, s.ports = s.fds[1:], s.ports[1:]
					continue
				}
				p := uint16(firstPort + next%20_000)
				next++
				fd, err := listener(p)
				if err != nil {
					return err
				}
				s.fds, s.ports = append(s.fds, fd), append(s.ports, p)
			}
			ended = time.Now()
			time.Sleep(max(time.Millisecond, time.Until(begin.Add(time.Duration(n)*time.Second/time.Duration(rate)))))
		}
		return ctx.Err()
	})
	return n, ended, s, err
}

// converged waits until just these listeners stand at the other end of the link.
func (p *peer) converged(ctx context.Context, ports []uint16) (last time.Time, err error) {
	for end := time.Now().Add(readyWithin); time.Now().Before(end); {
		if last, err = p.settled(ctx, len(ports)); err != nil {
			return last, err
		}
		p.mu.Lock()
		missing := 0
		for _, n := range ports {
			if !p.now[tcpKey(n)] {
				missing++
			}
		}
		p.mu.Unlock()
		if missing == 0 {
			return last, nil
		}
		time.Sleep(time.Millisecond)
	}
	return last, fmt.Errorf("other listeners stand than the %d that should, after %v", len(ports), readyWithin)
}

// bursts opens thousands of listeners at once, with a new agent for each burst.
func bursts(ctx context.Context, e *Env) error {
	for _, n := range []int{2000, 10_000}[:e.Of(2, 2, 1)] {
		var done, cpu, rss [3][]float64
		var errs [3]error
		var by [3]string
		for range e.Of(3, 2, 1) {
			for i, m := range modes {
				if errs[i] != nil {
					continue
				}
				var b burst
				if b, errs[i] = burstOnce(ctx, e, m, n); errs[i] == nil {
					done[i], cpu[i], rss[i] = append(done[i], b.done.Seconds()), append(cpu[i], b.cpu.Seconds()), append(rss[i], b.rss)
					by[i] = b.by
				}
				if ctx.Err() != nil {
					return ctx.Err()
				}
			}
		}
		for _, what := range []struct {
			measure, unit string
			samples       [3][]float64
		}{{burstDone, "s", done}, {burstCPU, "s", cpu}, {burstRSS, "B", rss}} {
			for i, m := range modes {
				c := report.Cell{Measure: what.measure, Mode: m.name, Size: float64(n), SizeUnit: "listeners", Unit: what.unit, By: by[i]}
				if errs[i] != nil {
					e.Fail(c, errs[i])
					continue
				}
				e.Samples(c, what.samples[i])
			}
		}
	}
	return nil
}

type burst struct {
	done, cpu time.Duration
	rss       float64
	by        string
}

func burstOnce(ctx context.Context, e *Env, m mode, n int) (b burst, err error) {
	l, err := newLinked(ctx, e, m)
	if err != nil {
		return b, err
	}
	defer l.close()
	if err := pause(ctx, 500*time.Millisecond); err != nil { // what the start left to do
		return b, err
	}
	before, err := l.used()
	if err != nil {
		return b, err
	}
	var ended time.Time
	if l.open, ended, err = fill(l.space, n, firstPort); err != nil {
		return b, err
	}
	// None is lost: this waits until all stand, and fails where they do not.
	last, err := l.peer.settled(ctx, n)
	if err != nil {
		return b, err
	}
	if err := pause(ctx, 200*time.Millisecond); err != nil { // acknowledgements
		return b, err
	}
	after, err := l.used()
	if err != nil {
		return b, err
	}
	return burst{max(last.Sub(ended), 0), after.cpu - before.cpu, float64(after.rss), l.by}, l.check(ctx)
}

// udpBinds binds and closes UDP sockets beside many listeners, in all modes at once.
func udpBinds(ctx context.Context, e *Env) error {
	const rate = 200
	ls, errs := linkedModes(ctx, e, e.Of(1000, 1000, 100))
	defer closeAll(ls)
	if err := pause(ctx, time.Second); err != nil {
		return err
	}
	lasts := e.For(10*time.Second, 5*time.Second, time.Second)
	var wg sync.WaitGroup
	used := make([]float64, len(ls))
	for i, l := range ls {
		if errs[i] != nil {
			continue
		}
		wg.Go(func() {
			err := bindUDP(ctx, l, rate, lasts/5)
			var before usage
			if err == nil {
				before, err = l.used()
			}
			if err == nil {
				err = bindUDP(ctx, l, rate, lasts)
			}
			var after usage
			if err == nil {
				after, err = l.used()
			}
			used[i] = after.core(before)
			errs[i] = errors.Join(err, l.check(ctx))
		})
	}
	wg.Wait()
	for i, m := range modes {
		c := report.Cell{Measure: udpCPU, Mode: m.name, Unit: "%"}
		if errs[i] != nil {
			e.Fail(c, errs[i])
			continue
		}
		c.By = ls[i].by
		e.Value(c, used[i])
	}
	return nil
}

func bindUDP(ctx context.Context, l *linked, rate int, lasts time.Duration) error {
	return l.space.Do(func() error {
		begin := time.Now()
		for n := 0; time.Since(begin) < lasts && ctx.Err() == nil; n++ {
			time.Sleep(time.Until(begin.Add(time.Duration(n) * time.Second / time.Duration(rate))))
			fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				return err
			}
			err = unix.Bind(fd, &unix.SockaddrInet4{Port: 40000 + n%10_000})
			time.Sleep(time.Second / time.Duration(rate)) // it lives as long as the next is away
			if err := errors.Join(err, unix.Close(fd)); err != nil {
				return err
			}
		}
		return ctx.Err()
	})
}
