// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"errors"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/schedule"
)

const (
	churnCPU      = "CPU time for each change"
	churnSwitches = "context switches of the agent for each change"
	churnDone     = "last change → the other end of the link has it all"

	burstDone = "burst: last listener opened → all are at the other end of the link"
	burstCPU  = "burst: CPU time in all"
	burstRSS  = "burst: memory afterwards (RSS)"

	udpCPU = "200 short-lived UDP binds a second beside 1,000 listeners: CPU"
)

// A hundred listeners are open while others come and go at these rates per second.
var rates = []int{1, 100, 10_000}

func churnPart() part {
	return part{"churn", "churn", []measure{
		{name: churnCPU, unit: "s", modes: ownModes, sizes: rates, sizeUnit: "changes per second", figure: figure{"churn-cpu", lines}},
		{name: churnSwitches, modes: ownModes, sizes: rates, sizeUnit: "changes per second"},
		{name: churnDone, unit: "s", modes: ownModes, sizes: rates, sizeUnit: "changes per second"},
	}, func(ctx context.Context, b *bench) error {
		var alone sync.Mutex // held at the highest rate, which is too much for all modes at once
		return b.each(ctx, 0, 3*time.Second, func(ctx context.Context, g *guest) error {
			for _, rate := range b.sizes(rates) {
				for range b.of(3, 1, 1) {
					if err := g.churn(ctx, rate, &alone); err != nil {
						return err
					}
				}
			}
			return nil
		})
	}}
}

func (g *guest) churn(ctx context.Context, rate int, alone *sync.Mutex) error {
	lasts := g.b.lasting(5*time.Second, 3*time.Second, time.Second)
	if rate == 1 {
		lasts *= 2
	}
	if rate >= 10_000 {
		alone.Lock()
		defer alone.Unlock()
	}
	before, err := g.used()
	if err != nil {
		return err
	}
	c, err := g.change(ctx, rate, lasts)
	defer c.fds.close()
	if err != nil {
		return err
	}
	last, err := g.peer.settle(ctx, len(c.ports), c.ports...)
	if err != nil {
		return err
	}
	after, err := g.used()
	if err != nil {
		return err
	}
	g.b.add(churnCPU, g.mode.name, rate, (after.CPU-before.CPU).Seconds()/float64(c.n))
	g.b.add(churnSwitches, g.mode.name, rate, float64(after.Switches-before.Switches)/float64(c.n))
	g.b.add(churnDone, g.mode.name, rate, max(last.Sub(c.ended), 0).Seconds())
	c.fds.close()
	c.fds = nil
	_, err = g.peer.settle(ctx, 0)
	return err
}

// changes are changes that were made, and what is open after them.
type changes struct {
	n     int
	ended time.Time
	fds   sockets // oldest first
	ports []uint16
}

// change opens and closes listeners at a rate.
func (g *guest) change(ctx context.Context, rate int, lasts time.Duration) (c changes, err error) {
	err = g.space.Do(func() error {
		begin := time.Now()
		total := int(float64(rate) * lasts.Seconds())
		for next := uint16(0); c.n < total && ctx.Err() == nil; {
			// Several changes may be due at once, because a sleep takes a millisecond.
			for due := min(total, 1+int(float64(rate)*time.Since(begin).Seconds())); c.n < due; c.n++ {
				if len(c.fds) > 100 || c.n%2 == 1 && rate < 100 {
					_ = unix.Close(c.fds[0])
					c.fds, c.ports = c.fds[1:], c.ports[1:]
					continue
				}
				port := firstPort + next%20_000
				next++
				fd, _, err := openSocket(tcpKey(port))
				if err != nil {
					return err
				}
				c.fds, c.ports = append(c.fds, fd), append(c.ports, port)
			}
			c.ended = time.Now()
			time.Sleep(max(time.Millisecond, time.Until(begin.Add(time.Duration(c.n)*time.Second/time.Duration(rate)))))
		}
		return ctx.Err()
	})
	return c, err
}

var bursts = []int{2000, 10_000}

func burstPart() part {
	return part{"burst", "churn", []measure{
		{name: burstDone, unit: "s", modes: ownModes, sizes: bursts, sizeUnit: "listeners", figure: figure{"burst", lines}},
		{name: burstCPU, unit: "s", modes: ownModes, sizes: bursts, sizeUnit: "listeners"},
		{name: burstRSS, unit: "B", modes: ownModes, sizes: bursts, sizeUnit: "listeners"},
	}, func(ctx context.Context, b *bench) error {
		for _, n := range b.sizes(bursts) {
			for range b.of(3, 3, 1) {
				for _, m := range modes {
					if err := b.burst(ctx, m, n); err != nil {
						return err
					}
				}
			}
		}
		return nil
	}}
}

// burst opens many listeners at once beside a new agent.
func (b *bench) burst(ctx context.Context, m mode, n int) error {
	g, err := b.guest(ctx, m, 0)
	if err != nil {
		return err
	}
	defer g.close()
	if err := schedule.Sleep(ctx, 500*time.Millisecond); err != nil { // what the start left to do
		return err
	}
	before, err := g.used()
	if err != nil {
		return err
	}
	ended, err := g.fill(n)
	if err != nil {
		return err
	}
	last, err := g.peer.settle(ctx, n) // all of them: an error if one was lost
	if err != nil {
		return err
	}
	if err := schedule.Sleep(ctx, 200*time.Millisecond); err != nil { // acknowledgements
		return err
	}
	after, err := g.used()
	if err != nil {
		return err
	}
	b.add(burstDone, m.name, n, max(last.Sub(ended), 0).Seconds())
	b.add(burstCPU, m.name, n, (after.CPU - before.CPU).Seconds())
	b.add(burstRSS, m.name, n, float64(after.RSS))
	return g.check(ctx)
}

func udpPart() part {
	return part{"udp", "churn", []measure{{name: udpCPU, unit: "%", modes: ownModes}}, func(ctx context.Context, b *bench) error {
		lasts := b.lasting(10*time.Second, 5*time.Second, time.Second)
		return b.each(ctx, b.of(1000, 1000, 100), time.Second, func(ctx context.Context, g *guest) error {
			if err := g.bindUDP(ctx, lasts/5); err != nil { // before the agent begins to batch
				return err
			}
			before, err := g.used()
			if err != nil {
				return err
			}
			if err := g.bindUDP(ctx, lasts); err != nil {
				return err
			}
			after, err := g.used()
			b.add(udpCPU, g.mode.name, 0, after.Core(before))
			return err
		})
	}}
}

// bindUDP binds 200 UDP sockets a second, each of which lives for 5 ms.
func (g *guest) bindUDP(ctx context.Context, lasts time.Duration) error {
	const life = 5 * time.Millisecond
	return g.space.Do(func() error {
		begin := time.Now()
		for n := 0; time.Since(begin) < lasts && ctx.Err() == nil; n++ {
			time.Sleep(time.Until(begin.Add(time.Duration(n) * life)))
			fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				return err
			}
			err = unix.Bind(fd, &unix.SockaddrInet4{Port: 40_000 + n%10_000})
			time.Sleep(life)
			if err := errors.Join(err, unix.Close(fd)); err != nil {
				return err
			}
		}
		return ctx.Err()
	})
}
