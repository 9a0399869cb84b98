// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/test/bench/report"
	"github.com/fairlead/fairlead/test/kit/netns"
)

// The measures of latency, in the order of the report.
const (
	openMessage = "listen() returns → message on the link"
	bindMessage = "UDP bind() returns → message on the link"
	openHost    = "listen() returns → host port accepts"
	gone        = "close() returns → withdrawal on the link"
)

func latencyPart() Part {
	return Part{
		Section: report.Section{
			Name: "latency", Title: "How soon a port is there, and gone",
			About: `The time from the moment that the system call returns in the guest to the moment that
the message arrives at the other end of the link, or that a host peer's port accepts a connection.
All modes run at the same time, each with guests of its own, in turns at moments of their own
choice, so that pollers are met at any phase; agents are idle otherwise and know few ports.
UDP is bound a tenth as often: where it comes and goes without end, it is read in batches, each some tens of milliseconds.`,
			Figures: []report.Figure{
				{File: "latency-open", Title: "listen() to message on the link", Measure: openMessage, Kind: report.Distribution, X: "time", Y: "share of ports", LogX: true},
				{File: "latency-close", Title: "close() to withdrawal on the link", Measure: gone, Kind: report.Distribution, X: "time", Y: "share of ports", LogX: true},
			},
		},
		Run: latency,
	}
}

// probe measures one mode: one guest whose link the probe holds itself, to see
// the messages, and one with a real host peer.
type probe struct {
	mode           mode
	by             string
	linked, hosted *guest
	peer           *peer

	mu      sync.Mutex
	samples map[string][]float64
	port    uint16
}

func latency(ctx context.Context, e *Env) error {
	var probes []*probe
	defer func() {
		for _, p := range probes {
			p.close()
		}
	}()
	errs := make([]error, len(modes))
	for i, m := range modes {
		dir, err := e.Dir()
		if err != nil {
			return err
		}
		p, err := newProbe(ctx, e.Program, dir, m)
		if errs[i] = err; err != nil {
			p = &probe{mode: m}
		}
		probes = append(probes, p)
	}
	rounds := e.Of(7, 4, 1)
	for r := range rounds {
		e.Progress("round %d of %d", r+1, rounds)
		var wg sync.WaitGroup
		for i, p := range probes {
			if errs[i] == nil {
				wg.Go(func() { errs[i] = p.round(ctx, e) })
			}
		}
		wg.Wait()
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
	for _, measure := range []string{openMessage, bindMessage, openHost, gone} {
		for i, p := range probes {
			c := report.Cell{Measure: measure, Mode: p.mode.name, Unit: "s", By: p.by}
			err := errs[i]
			if err == nil {
				of := p.linked
				if measure == openHost {
					of = p.hosted
				}
				err = of.check(ctx)
			}
			if err != nil {
				e.Fail(c, err)
				continue
			}
			e.Samples(c, p.samples[measure])
		}
	}
	return nil
}

// round takes one after another where a sample is quick, and several at once
// where it waits for a poller.
func (p *probe) round(ctx context.Context, e *Env) error {
	if p.mode.poll == 0 {
		for range e.Of(150, 100, 5) {
			if err := p.measure(ctx); err != nil {
				return err
			}
		}
		return nil
	}
	var wg sync.WaitGroup
	errs := make([]error, e.Of(12, 12, 2))
	for i := range errs {
		wg.Go(func() { errs[i] = p.measure(ctx) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// newProbe starts both guests of a mode; the caller closes it.
func newProbe(ctx context.Context, binary, dir string, m mode) (_ *probe, err error) {
	p := &probe{mode: m, samples: map[string][]float64{}, port: 20000}
	defer func() {
		if err != nil {
			p.close()
		}
	}()
	if p.linked, err = newGuest(binary, filepath.Join(dir, "linked"), m); err != nil {
		return nil, err
	}
	if p.hosted, err = newGuest(binary, filepath.Join(dir, "hosted"), m); err != nil {
		return nil, err
	}
	if err := p.hosted.start(p.hosted.outside, binary, "host", "--link-token=", "--connect", p.hosted.link,
		"--control", filepath.Join(dir, "host", "s"), "--log-level", "error"); err != nil {
		return nil, err
	}
	for _, g := range []*guest{p.linked, p.hosted} {
		if p.by, err = g.ready(ctx); err != nil {
			return nil, err
		}
	}
	p.peer, err = newPeer(ctx, p.linked)
	return p, err
}

func (p *probe) close() {
	if p.peer != nil {
		p.peer.close()
	}
	for _, g := range []*guest{p.linked, p.hosted} {
		if g != nil {
			g.close()
		}
	}
}

// next returns a port that no sample has used lately.
func (p *probe) next() uint16 {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.port++
	if p.port > 30000 {
		p.port = 20001
	}
	return p.port
}

func (p *probe) sample(measure string, d time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.samples[measure] = append(p.samples[measure], max(d, 0).Seconds())
}

// measure takes one sample of each measure.
func (p *probe) measure(ctx context.Context) error {
	k := port.Key{Protocol: port.TCP, Address: netip.MustParseAddr("127.0.0.1"), Port: p.next()}
	p.pause()
	fd, err := p.await(ctx, openMessage, k)
	if err != nil {
		return err
	}
	p.pause()
	said := p.peer.expect(k)
	_ = unix.Close(fd)
	closed := time.Now()
	at, err := p.peer.wait(ctx, said)
	if err != nil {
		return fmt.Errorf("%s: %w", gone, err)
	}
	p.sample(gone, at.Sub(closed))
	p.pause()
	// A tenth as often by events: UDP that comes and goes without end is read in batches.
	if p.mode.poll != 0 || k.Port%10 == 1 {
		k.Protocol = port.UDP
		if fd, err = p.await(ctx, bindMessage, k); err != nil {
			return err
		}
		_ = unix.Close(fd)
		p.pause()
		k.Protocol = port.TCP
	}
	return p.throughHost(ctx, k)
}

// await opens a socket and takes the time until it is told.
func (p *probe) await(ctx context.Context, measure string, k port.Key) (fd int, err error) {
	said := p.peer.expect(k)
	fd, opened, err := open(p.linked.space, k)
	if err != nil {
		return -1, err
	}
	at, err := p.peer.wait(ctx, said)
	if err != nil {
		_ = unix.Close(fd)
		return -1, fmt.Errorf("%s: %w", measure, err)
	}
	p.sample(measure, at.Sub(opened))
	return fd, nil
}

// pause ends at any phase of a poller, and after the acknowledgement, which is
// not part of what is measured.
func (p *probe) pause() { time.Sleep(2*time.Millisecond + rand.N(8*time.Millisecond+p.mode.poll)) }

// open makes a listener, or a bound UDP socket, with bare system calls, so that
// the clock starts when listen(2) or bind(2) returns.
func open(s *netns.Space, k port.Key) (fd int, returned time.Time, err error) {
	kind := unix.SOCK_STREAM
	if k.Protocol == port.UDP {
		kind = unix.SOCK_DGRAM
	}
	err = s.Do(func() error {
		if fd, err = unix.Socket(unix.AF_INET, kind|unix.SOCK_CLOEXEC, 0); err != nil {
			return err
		}
		err = unix.Bind(fd, &unix.SockaddrInet4{Port: int(k.Port), Addr: k.Address.As4()})
		if err == nil && kind == unix.SOCK_STREAM {
			err = unix.Listen(fd, 8)
		}
		returned = time.Now()
		if err != nil {
			_ = unix.Close(fd)
		}
		return err
	})
	return fd, returned, err
}

// throughHost dials the host's port until it accepts.
func (p *probe) throughHost(ctx context.Context, k port.Key) error {
	fd, opened, err := open(p.hosted.space, k)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	// Each try runs the hooks of every agent; where one interrupts another on the
	// same processor, an agent counts a loss.
	between := 100 * time.Microsecond
	if p.mode.poll != 0 {
		between = 2 * time.Millisecond // beside seconds; it leaves the processor to others
	}
	err = p.hosted.outside.Do(func() error {
		for time.Since(opened) < limit && ctx.Err() == nil {
			c, err := net.DialTimeout("tcp4", k.AddrPort().String(), time.Second)
			if err == nil {
				p.sample(openHost, time.Since(opened))
				return c.Close()
			}
			time.Sleep(between)
		}
		return fmt.Errorf("%s: nothing within %v", openHost, limit)
	})
	return err
}
