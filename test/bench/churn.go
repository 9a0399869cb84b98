// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/schedule"
)

const (
	churnCPU = "CPU time for each change"

	burstDone = "burst: last listener opened → all at the other end of the link"
	burstCPU  = "burst: total CPU time"
	burstRSS  = "burst: memory after it (RSS)"

	udpCPU = "200 short-lived UDP binds per second beside 1,000 listeners: CPU"
)

// rates of changes per second, with a hundred listeners open.
var rates = []int{1, 100, 10_000}

func churnPart() part {
	return part{"churn", "churn", []measure{
		{name: churnCPU, unit: "s", modes: ownModes, sizes: rates, sizeUnit: "changes per second", figure: "churn-cpu"},
	}, func(ctx context.Context, b *bench) {
		var alone sync.Mutex // held at the highest rate, which is too much for all modes at once
		b.each(ctx, 0, 3*time.Second, func(ctx context.Context, g *guest) {
			for _, rate := range b.sizes(rates) {
				for range b.of(3, 1, 1) {
					g.churn(ctx, rate, &alone)
				}
			}
		})
	}}
}

func (g *guest) churn(ctx context.Context, rate int, alone *sync.Mutex) {
	lasts := g.b.lasting(5*time.Second, 3*time.Second, time.Second)
	if rate == 1 {
		lasts *= 2
	}
	if rate >= 10_000 {
		alone.Lock()
		defer alone.Unlock()
	}
	before := g.used()
	n, ports := g.change(ctx, rate, lasts)
	g.peer.settle(ctx, len(ports), ports...)
	g.b.add(churnCPU, g.mode.name, rate, (g.used().CPU-before.CPU).Seconds()/n)
	g.fds.close()
	g.peer.settle(ctx, 0)
}

// change opens and closes listeners at a rate. It returns the number of changes, and the
// ports that are still open.
func (g *guest) change(ctx context.Context, rate int, lasts time.Duration) (n float64, ports []uint16) {
	inside(g.space, func() {
		begin := time.Now()
		total := int(float64(rate) * lasts.Seconds())
		next := uint16(0)
		for i := 0; i < total; {
			// Several changes may be due at once, because a sleep takes a millisecond.
			for due := min(total, 1+int(float64(rate)*time.Since(begin).Seconds())); i < due; i++ {
				if len(g.fds) > 100 || i%2 == 1 && rate < 100 {
					_ = unix.Close(g.fds[0])
					g.fds, ports = g.fds[1:], ports[1:]
					continue
				}
				port := firstPort + next%20_000
				next++
				fd, _ := openSocket(tcpKey(port))
				g.fds, ports = append(g.fds, fd), append(ports, port)
			}
			check(schedule.Sleep(ctx, max(time.Millisecond, time.Until(begin.Add(time.Duration(i)*time.Second/time.Duration(rate))))))
		}
		n = float64(total)
	})
	return n, ports
}

var bursts = []int{2000, 10_000}

func burstPart() part {
	return part{"burst", "churn", []measure{
		{name: burstDone, unit: "s", modes: ownModes, sizes: bursts, sizeUnit: "listeners", figure: "burst"},
		{name: burstCPU, unit: "s", modes: ownModes, sizes: bursts, sizeUnit: "listeners"},
		{name: burstRSS, unit: "B", modes: ownModes, sizes: bursts, sizeUnit: "listeners"},
	}, func(ctx context.Context, b *bench) {
		for _, n := range b.sizes(bursts) {
			for range b.of(3, 1, 1) {
				for _, m := range modes {
					b.burst(ctx, m, n)
				}
			}
		}
	}}
}

// burst opens many listeners at once beside a new agent.
func (b *bench) burst(ctx context.Context, m mode, n int) {
	g := b.guest(ctx, m, 0)
	defer g.close()
	check(schedule.Sleep(ctx, 500*time.Millisecond)) // what the start left to do
	before := g.used()
	ended := g.fill(n)
	last := g.peer.settle(ctx, n)                    // all of them: it fails if one was lost
	check(schedule.Sleep(ctx, 200*time.Millisecond)) // acknowledgements
	after := g.used()
	b.add(burstDone, m.name, n, max(last.Sub(ended), 0).Seconds())
	b.add(burstCPU, m.name, n, (after.CPU - before.CPU).Seconds())
	b.add(burstRSS, m.name, n, float64(after.RSS))
	g.check(ctx)
}

func udpPart() part {
	return part{"udp", "churn", []measure{{name: udpCPU, unit: "%", modes: ownModes}}, func(ctx context.Context, b *bench) {
		lasts := b.lasting(10*time.Second, 5*time.Second, time.Second)
		b.each(ctx, b.of(1000, 1000, 100), time.Second, func(_ context.Context, g *guest) {
			g.bindUDP(lasts / 5) // until the agent batches
			before := g.used()
			g.bindUDP(lasts)
			b.add(udpCPU, g.mode.name, 0, g.used().Core(before))
		})
	}}
}

// bindUDP binds 200 UDP sockets a second, each of which lives for 5 ms.
func (g *guest) bindUDP(lasts time.Duration) {
	const life = 5 * time.Millisecond
	inside(g.space, func() {
		begin := time.Now()
		for n := 0; time.Since(begin) < lasts; n++ {
			time.Sleep(time.Until(begin.Add(time.Duration(n) * life)))
			fd := must(unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0))
			check(unix.Bind(fd, &unix.SockaddrInet4{Port: 40_000 + n%10_000}))
			time.Sleep(life)
			check(unix.Close(fd))
		}
	})
}
