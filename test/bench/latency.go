// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"math/rand/v2"
	"net"
	"os/exec"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/schedule"
)

const (
	openMessage  = "Listen"
	bindMessage  = "BindUDP"
	openHost     = "ListenToHost"
	closeMessage = "Close"
)

func latencyPart() part {
	return part{"latency", "latency", []measure{
		{name: openMessage, title: "listen() returns → message on the link", unit: "sec", modes: ownModes},
		{name: bindMessage, title: "UDP bind() returns → message on the link", unit: "sec", modes: ownModes},
		{name: openHost, title: "listen() returns → host port accepts", unit: "sec", modes: ownModes},
		{name: closeMessage, title: "close() returns → withdrawal on the link", unit: "sec", modes: ownModes},
	}, func(ctx context.Context, b *bench) {
		var probes []*probe
		for _, m := range modes {
			probes = append(probes, newProbe(ctx, b, m))
		}
		together(ctx, probes, func(ctx context.Context, p *probe) {
			for range b.of(7, 1, 1) {
				p.round(ctx)
			}
			p.linked.check(ctx)
			p.hosted.check(ctx)
		})
	}}
}

// probe measures one mode: in a guest whose link the benchmark holds, to see the
// messages, and in one with a host peer.
type probe struct {
	b              *bench
	mode           mode
	linked, hosted *guest
	ports          atomic.Uint32
}

func newProbe(ctx context.Context, b *bench, m mode) *probe {
	p := &probe{b: b, mode: m, linked: b.guest(ctx, m, 0), hosted: b.newGuest(m, b.space())}
	p.hosted.start()
	p.hosted.ready(ctx)
	p.hosted.startHost()
	return p
}

// round takes samples one after the other if they are quick, and several at once if
// they wait for a poller.
func (p *probe) round(ctx context.Context) {
	if p.mode.poll > 0 {
		together(ctx, make([]struct{}, p.b.of(12, 12, 2)), func(ctx context.Context, _ struct{}) { p.sample(ctx) })
		return
	}
	for range p.b.of(150, 100, 5) {
		p.sample(ctx)
	}
}

// sample takes one sample of each measure.
func (p *probe) sample(ctx context.Context) {
	n := p.ports.Add(1)
	k := tcpKey(uint16(20_000 + n%10_000))
	fd := p.await(ctx, openMessage, k)
	wait := p.linked.peer.expectGone(k)
	p.pause(ctx)
	_ = unix.Close(fd)
	closed := time.Now()
	p.add(closeMessage, wait(ctx).Sub(closed))
	// The agent batches UDP binds that are frequent.
	if p.mode.poll != 0 || n%10 == 1 {
		udp := k
		udp.Protocol = port.UDP
		_ = unix.Close(p.await(ctx, bindMessage, udp))
	}
	p.throughHost(ctx, k)
}

func (p *probe) add(measure string, d time.Duration) {
	p.b.add(measure, p.mode.name, 0, seconds(max(d, 0)))
}

// pause ends at a random phase of a poller's interval, and after the acknowledgement,
// which is not measured.
func (p *probe) pause(ctx context.Context) {
	check(schedule.Sleep(ctx, 2*time.Millisecond+rand.N(8*time.Millisecond+p.mode.poll)))
}

// await opens a socket and measures the time until its message.
func (p *probe) await(ctx context.Context, measure string, k port.Key) (fd int) {
	p.pause(ctx)
	wait := p.linked.peer.expect(k, "")
	fd, opened := p.linked.open(k)
	p.add(measure, wait(ctx).Sub(opened))
	return fd
}

// throughHost dials the host's port until it accepts.
func (p *probe) throughHost(ctx context.Context, k port.Key) {
	p.pause(ctx)
	fd, opened := p.hosted.open(k)
	defer func() { _ = unix.Close(fd) }()
	// Each try runs the hooks of every agent. If one interrupts another on the same
	// processor, the agent counts a loss.
	between := 100 * time.Microsecond
	if p.mode.poll != 0 {
		between = 2 * time.Millisecond
	}
	inside(p.hosted.outside, func() {
		c := must(retry(ctx, between, func() (net.Conn, error) {
			return net.DialTimeout("tcp4", k.AddrPort().String(), time.Second)
		}))
		p.add(openHost, time.Since(opened))
		_ = c.Close()
	})
}

const seenShare = "Seen"

// lifetimes of ports, in milliseconds.
var lifetimes = []int{1, 10, 100, 1000, 5000}

func missedPart() part {
	return part{"missed", "missed", []measure{
		{name: seenShare, title: "ports that were reported", unit: "%", modes: ownModes, sizes: lifetimes, sizeUnit: "ms lifetime"},
	}, missed}
}

// missed opens ports at random moments, and counts those that were reported.
func missed(ctx context.Context, b *bench) {
	life := map[uint16]int{} // of each port
	var ports []uint16
	n, window := b.of(200, 100, 5), b.lasting(20*time.Second, 10*time.Second, time.Second)
	for _, l := range b.sizes(lifetimes) {
		for range n {
			p := firstPort + uint16(len(ports))
			ports, life[p] = append(ports, p), l
		}
	}
	b.each(ctx, 0, 0, func(ctx context.Context, g *guest) {
		together(ctx, ports, func(ctx context.Context, p uint16) {
			check(schedule.Sleep(ctx, rand.N(window)))
			fd, opened := g.open(tcpKey(p))
			time.Sleep(time.Until(opened.Add(time.Duration(life[p]) * time.Millisecond)))
			_ = unix.Close(fd)
		})
		check(schedule.Sleep(ctx, 3500*time.Millisecond)) // the slowest poller polls once more
		seen := map[int]float64{}
		for _, p := range ports {
			if g.peer.saw(tcpKey(p)) {
				seen[life[p]]++
			}
		}
		for _, l := range b.sizes(lifetimes) {
			b.add(seenShare, g.mode.name, l, values{"%": 100 * seen[l] / float64(n), "ports": float64(n)})
		}
	})
}

func hookPart() part {
	// The modes say what the caller's namespace is to the observer.
	return part{"hook", "hook", []measure{
		{name: "Pair", title: "added to listen() and close()", unit: "sec/op", modes: []string{"unwatched", "burst", "idle"}},
	}, hooks}
}

// hooks runs the observer's own benchmark: no other process may be in between.
func hooks(ctx context.Context, b *bench) {
	args := []string{"test", "-tags", "root", "-run", "^$", "-bench", "^BenchmarkPair$", "-benchtime", "1x"}
	if b.scale == tiny {
		args = append(args, "-short")
	}
	b.collect(exec.CommandContext(ctx, "go", append(args, "./internal/observer")...), (*exec.Cmd).Run)
}
