// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/schedule"
)

const (
	openMessage  = "listen() returns → message on the link"
	bindMessage  = "UDP bind() returns → message on the link"
	openHost     = "listen() returns → host port accepts"
	closeMessage = "close() returns → withdrawal on the link"
)

func latencyPart() part {
	return part{"latency", "latency", []measure{
		{name: openMessage, unit: "s", modes: ownModes, figure: figure{"latency-open", cdf}},
		{name: bindMessage, unit: "s", modes: ownModes},
		{name: openHost, unit: "s", modes: ownModes},
		{name: closeMessage, unit: "s", modes: ownModes, figure: figure{"latency-close", cdf}},
	}, latency}
}

// probe measures one mode: in a guest whose link the benchmark holds, to see the
// messages, and in one with a host peer.
type probe struct {
	b              *bench
	mode           mode
	linked, hosted *guest
	ports          atomic.Uint32
}

func latency(ctx context.Context, b *bench) error {
	var probes []*probe
	for _, m := range modes {
		p, err := newProbe(ctx, b, m)
		if err != nil {
			return fmt.Errorf("%s: %w", m.name, err)
		}
		probes = append(probes, p)
	}
	group, sampling := errgroup.WithContext(ctx)
	rounds := b.of(7, 2, 1)
	for _, p := range probes {
		group.Go(func() error {
			for range rounds {
				if err := p.round(sampling); err != nil {
					return fmt.Errorf("%s: %w", p.mode.name, err)
				}
			}
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		return err
	}
	for _, p := range probes {
		if err := together(ctx, []*guest{p.linked, p.hosted}, func(context.Context, *guest) error { return nil }); err != nil {
			return err
		}
	}
	return nil
}

func newProbe(ctx context.Context, b *bench, m mode) (p *probe, err error) {
	p = &probe{b: b, mode: m}
	if p.linked, err = b.guest(ctx, m, 0); err != nil {
		return nil, err
	}
	if p.hosted, err = b.newGuest(m, nil); err != nil {
		return nil, err
	}
	if err := p.hosted.start(); err != nil {
		return nil, err
	}
	if err := p.hosted.ready(ctx); err != nil {
		return nil, err
	}
	return p, p.hosted.startHost()
}

// round takes samples one after the other if they are quick, and several at once if
// they wait for a poller.
func (p *probe) round(ctx context.Context) error {
	if p.mode.poll == 0 {
		for range p.b.of(150, 100, 5) {
			if err := p.sample(ctx); err != nil {
				return err
			}
		}
		return nil
	}
	group, ctx := errgroup.WithContext(ctx)
	for range p.b.of(12, 12, 2) {
		group.Go(func() error { return p.sample(ctx) })
	}
	return group.Wait()
}

// sample takes one sample of each measure.
func (p *probe) sample(ctx context.Context) error {
	n := p.ports.Add(1)
	k := tcpKey(uint16(20_000 + n%10_000))
	fd, err := p.await(ctx, openMessage, k)
	if err != nil {
		return err
	}
	wait := p.linked.peer.expect(k, "")
	if err := p.pause(ctx); err != nil {
		return err
	}
	_ = unix.Close(fd)
	closed := time.Now()
	at, err := wait(ctx)
	if err != nil {
		return err
	}
	p.add(closeMessage, at.Sub(closed))
	// The agent batches UDP binds that are frequent.
	if p.mode.poll != 0 || n%10 == 1 {
		udp := k
		udp.Protocol = port.UDP
		if fd, err = p.await(ctx, bindMessage, udp); err != nil {
			return err
		}
		_ = unix.Close(fd)
	}
	return p.throughHost(ctx, k)
}

func (p *probe) add(measure string, d time.Duration) {
	p.b.add(measure, p.mode.name, 0, max(d, 0).Seconds())
}

// pause ends at a random phase of a poller's interval, and after the acknowledgement,
// which is not measured.
func (p *probe) pause(ctx context.Context) error {
	return schedule.Sleep(ctx, 2*time.Millisecond+rand.N(8*time.Millisecond+p.mode.poll))
}

// await opens a socket and measures the time until its message.
func (p *probe) await(ctx context.Context, measure string, k port.Key) (fd int, err error) {
	if err := p.pause(ctx); err != nil {
		return -1, err
	}
	wait := p.linked.peer.expect(k, "")
	fd, opened, err := p.linked.open(k)
	if err != nil {
		return -1, err
	}
	at, err := wait(ctx)
	if err != nil {
		_ = unix.Close(fd)
		return -1, err
	}
	p.add(measure, at.Sub(opened))
	return fd, nil
}

// throughHost dials the host's port until it accepts.
func (p *probe) throughHost(ctx context.Context, k port.Key) error {
	if err := p.pause(ctx); err != nil {
		return err
	}
	fd, opened, err := p.hosted.open(k)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	// Each try runs the hooks of every agent. If one interrupts another on the same
	// processor, the agent counts a loss.
	between := 100 * time.Microsecond
	if p.mode.poll != 0 {
		between = 2 * time.Millisecond
	}
	return p.hosted.outside.Do(func() error {
		for time.Since(opened) < limit {
			c, err := net.DialTimeout("tcp4", k.AddrPort().String(), time.Second)
			if err == nil {
				p.add(openHost, time.Since(opened))
				return c.Close()
			}
			if err := schedule.Sleep(ctx, between); err != nil {
				return err
			}
		}
		return fmt.Errorf("%s: not within %v", openHost, limit)
	})
}
