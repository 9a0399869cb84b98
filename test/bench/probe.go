// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/status"
	"github.com/fairlead/fairlead/internal/wire"
	"github.com/fairlead/fairlead/test/netns"
)

// probe measures one mode: one guest whose link the probe holds itself, to see
// the messages, and one with a real host peer.
type probe struct {
	mode    mode
	rung    string
	samples map[string][]time.Duration

	linked, hosted *guest
	session        link.Session
	lost           chan error // why the session ended
	port           uint16

	mu   sync.Mutex
	seen map[port.Key]chan time.Time // next message about a key
}

// guest is an agent in a namespace of its own.
type guest struct {
	space, outside *netns.Space
	control, link  string
	procs          []*exec.Cmd
}

func newProbe(ctx context.Context, binary, dir string, m mode) (_ *probe, err error) {
	p := &probe{mode: m, samples: map[string][]time.Duration{}, port: 20000, seen: map[port.Key]chan time.Time{}, lost: make(chan error, 1)}
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
		if p.rung, err = g.ready(ctx); err != nil {
			return nil, err
		}
	}
	if (m.poll == 0) == strings.Contains(p.rung, "poll") {
		return nil, fmt.Errorf("the agent observes by %q: this mode did not really run", p.rung)
	}
	return p, p.connect(ctx)
}

func newGuest(binary, dir string, m mode) (g *guest, err error) {
	g = &guest{control: filepath.Join(dir, "control", "s"), link: "unix://" + filepath.Join(dir, "link", "s")}
	if g.space, err = netns.New(); err != nil {
		return nil, err
	}
	if g.outside, err = netns.New(); err != nil {
		return nil, err
	}
	args := append([]string{"agent", "--link-token=", "--link", g.link, "--control", g.control, "--hold-down", "0s", "--log-level", "error"}, m.flags...)
	return g, g.start(g.space, binary, args...)
}

func (g *guest) start(in *netns.Space, binary string, args ...string) error {
	cmd := exec.Command(binary, args...)
	cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
	if err := in.Start(cmd); err != nil {
		return err
	}
	g.procs = append(g.procs, cmd)
	return nil
}

// ready waits for the first complete sync and returns the rung.
func (g *guest) ready(ctx context.Context) (string, error) {
	for range 400 {
		l, err := status.NewClient(g.control).List(ctx)
		if err == nil && l.Ready() {
			for _, s := range l.Sources {
				if s.Name == "socket" {
					return s.Rung, nil
				}
			}
		}
		time.Sleep(25 * time.Millisecond)
	}
	return "", errors.New("the agent did not become ready within 10 s")
}

func (g *guest) close() {
	for _, c := range g.procs {
		_ = c.Process.Signal(syscall.SIGTERM)
		_ = c.Wait()
	}
	_ = g.space.Close()
	_ = g.outside.Close()
}

func (p *probe) close() {
	if p.session != nil {
		_ = p.session.Close()
	}
	for _, g := range []*guest{p.linked, p.hosted} {
		if g != nil {
			g.close()
		}
	}
}

// connect takes the part of the host on the first guest's link.
func (p *probe) connect(ctx context.Context) error {
	at, err := link.ParseEndpoint(p.linked.link)
	if err != nil {
		return err
	}
	p.session, err = link.Dial(ctx, at, link.Options{
		Role: link.RoleHost, Identity: link.NewIdentity(), Name: "bench", Version: "bench", Logger: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		return err
	}
	go p.read()
	return nil
}

func (p *probe) read() {
	c := p.session.Control()
	for {
		m, err := wire.ReadControl(c)
		if err != nil {
			p.lost <- fmt.Errorf("the link ended: %w", err)
			return
		}
		now := time.Now()
		var ack wire.Ack
		switch {
		case m.Snapshot != nil:
			ack.Generation = m.Snapshot.Generation
			ack.Outcomes = p.put(m.Snapshot.Publications, now)
		case m.Change != nil:
			ack.Generation = m.Change.Generation
			ack.Outcomes = p.put(m.Change.Put, now)
			for _, k := range m.Change.Removed {
				p.say(k, now)
			}
		}
		if err := wire.WriteControl(c, wire.Control{Ack: &ack}); err != nil {
			p.lost <- fmt.Errorf("acknowledge: %w", err)
			return
		}
	}
}

func (p *probe) put(pubs []wire.Publication, now time.Time) (outcomes []wire.Outcome) {
	for _, pub := range pubs {
		p.say(pub.Key, now)
		outcomes = append(outcomes, wire.Outcome{Key: pub.Key, State: port.Active, HostAddress: pub.Host[0]})
	}
	return outcomes
}

func (p *probe) say(k port.Key, at time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if c, ok := p.seen[k]; ok {
		delete(p.seen, k)
		c <- at
	}
}

func (p *probe) expect(k port.Key) <-chan time.Time {
	c := make(chan time.Time, 1)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.seen[k] = c
	return c
}

// limit is far beyond what any mode needs.
const limit = 20 * time.Second

// measure takes one sample of each measure.
func (p *probe) measure(ctx context.Context) error {
	p.port++
	if p.port > 30000 {
		p.port = 20001
	}
	k := port.Key{Protocol: port.TCP, Address: netip.MustParseAddr("127.0.0.1"), Port: p.port}
	said := p.expect(k)
	fd, opened, err := listen(p.linked.space, k.Port)
	if err != nil {
		return err
	}
	if err := p.sample(ctx, openMessage, opened, said); err != nil {
		return err
	}
	p.pause()
	said = p.expect(k)
	_ = unix.Close(fd)
	if err := p.sample(ctx, gone, time.Now(), said); err != nil {
		return err
	}
	p.pause()
	return p.throughHost(ctx, k)
}

// pause ends at any phase of a poller, and after the acknowledgement, which is
// not part of what is measured.
func (p *probe) pause() { time.Sleep(2*time.Millisecond + rand.N(20*time.Millisecond+p.mode.poll)) }

func (p *probe) sample(ctx context.Context, measure string, from time.Time, said <-chan time.Time) error {
	select {
	case at := <-said:
		p.samples[measure] = append(p.samples[measure], max(at.Sub(from), 0))
		return nil
	case err := <-p.lost:
		return err
	case <-time.After(limit):
		return fmt.Errorf("%s: nothing within %v", measure, limit)
	case <-ctx.Done():
		return ctx.Err()
	}
}

// listen makes a listener with bare system calls, so that the clock starts when
// listen(2) returns.
func listen(s *netns.Space, p uint16) (fd int, returned time.Time, err error) {
	err = s.Do(func() error {
		if fd, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0); err != nil {
			return err
		}
		if err = unix.Bind(fd, &unix.SockaddrInet4{Port: int(p), Addr: [4]byte{127, 0, 0, 1}}); err == nil {
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
	fd, opened, err := listen(p.hosted.space, k.Port)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	var at time.Time
	err = p.hosted.outside.Do(func() error {
		for time.Since(opened) < limit && ctx.Err() == nil {
			c, err := net.DialTimeout("tcp4", k.AddrPort().String(), time.Second)
			if err == nil {
				at = time.Now()
				return c.Close()
			}
			time.Sleep(20 * time.Microsecond)
		}
		return fmt.Errorf("%s: nothing within %v", openHost, limit)
	})
	if err == nil {
		p.samples[openHost] = append(p.samples[openHost], at.Sub(opened))
	}
	return err
}
