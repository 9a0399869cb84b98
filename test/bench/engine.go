// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/test/bench/report"
	"github.com/fairlead/fairlead/test/kit/enclave"
	"github.com/fairlead/fairlead/test/kit/netns"
	"github.com/fairlead/fairlead/test/kit/program"
)

const (
	enginePublished = "container is started → message that names it, of a port that it publishes"
	engineHost      = "container is started → message that names it, of a port in the guest's own network"
)

func enginePart() Part {
	return Part{
		Section: report.Section{
			Name: "engine", Title: "How soon a container's port bears its name",
			About: `Containers of a real dockerd, each with a web server. The clock starts at the time that the engine's own event "start" bears:
what the engine takes before is its own. It stops when the message arrives at the other end of the link that has the port
with the container's name as its owner; what is told of the port before, without the name, does not count.

One container publishes its port (-p), the other has the guest's network (--network host), of which the engine says no port:
the agent has it of the socket and of the process's cgroup, so that here the modes differ. A published port is known
of the engine, and fairlead's agent hears the engine's events in each of its modes; pollers that the benchmark brings ask the
engine for the list of containers each second or each three, and publish nothing. All see the same containers.`,
		},
		Run: func(ctx context.Context, e *Env) error {
			if enclave.Dir() == "" {
				return e.inEnclave(ctx)
			}
			return containers(ctx, e)
		},
	}
}

// inEnclave runs the part in an enclave, and records what that measures: an engine
// wants mounts and cgroups of its own.
func (e *Env) inEnclave(ctx context.Context) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	dir, err := e.Dir()
	if err != nil {
		return err
	}
	file := filepath.Join(dir, "cells")
	args := []string{"-only", e.part, "-json", file, "-report", dir}
	if e.Scale != Full {
		args = append(args, "-"+e.Scale.String())
	}
	cmd := exec.CommandContext(ctx, self, args...)
	cmd.Env = append(os.Environ(), program.Variable+"="+e.Program)
	cmd.Stderr = e.Log
	ended := enclave.Run(cmd)
	in, err := os.Open(file)
	if err != nil {
		return errors.Join(ended, err)
	}
	defer func() { _ = in.Close() }()
	res, err := report.Read(in)
	if err != nil {
		return errors.Join(ended, err)
	}
	// Where a cell failed, that says why it ended so.
	if e.recordAll(res); len(res.Failed()) > 0 {
		ended = nil
	}
	return errors.Join(ended, ctx.Err())
}

// engineSight is somebody who sees containers.
type engineSight struct {
	mode string
	kind string // the measure
	by   string
	// expect returns where the time comes when a port bears a name.
	expect  func(k port.Key, name string) <-chan time.Time
	check   func(context.Context) error
	polls   bool // waits for a poller, and is not asked each time
	samples []float64
}

func containers(ctx context.Context, e *Env) error {
	d, err := startDocker(ctx, e)
	if err != nil {
		return err
	}
	defer d.close()
	here, err := netns.Open("/proc/self/ns/net")
	if err != nil {
		return err
	}
	host := &guest{space: here}
	var sights []*engineSight
	for _, m := range modes {
		dir, err := e.Dir()
		if err != nil {
			return err
		}
		g, err := host.beside(dir, m)
		if err != nil {
			return err
		}
		defer g.close()
		if err := g.begin(e.Program, "--docker-host", "unix://"+enclave.DockerSocket); err != nil {
			return err
		}
		by, err := g.ready(ctx)
		if err != nil {
			return fmt.Errorf("%s: %w", m.name, err)
		}
		p, err := newPeer(ctx, g)
		if err != nil {
			return err
		}
		defer p.close()
		for _, kind := range []string{enginePublished, engineHost} {
			sights = append(sights, &engineSight{
				mode: m.name, kind: kind, by: by, expect: p.expectOf, check: g.check,
				polls: m.poll != 0 && kind == engineHost,
			})
		}
	}
	for _, l := range []struct {
		mode  string
		every time.Duration
	}{{modeList1, time.Second}, {modeList3, 3 * time.Second}} {
		sights = append(sights, &engineSight{
			mode: l.mode, kind: enginePublished, by: "list", polls: true,
			expect: func(_ port.Key, name string) <-chan time.Time { return d.poll(ctx, name, l.every) },
			check:  func(context.Context) error { return nil }, // an answer that fails ends the part
		})
	}
	polled, all := e.Of(14, 6, 1), e.Of(104, 30, 2)
	for i := range all {
		if i%20 == 0 {
			e.Progress("container %d of %d", i+1, all)
		}
		if err := d.round(ctx, sights, i, i < polled); err != nil {
			return fmt.Errorf("container %d: %w", i, err)
		}
	}
	for _, kind := range []string{enginePublished, engineHost} {
		for _, s := range sights {
			if s.kind != kind {
				continue
			}
			c := report.Cell{Measure: kind, Mode: s.mode, Unit: "s", By: s.by}
			if err := s.check(ctx); err != nil {
				e.Fail(c, err)
				continue
			}
			e.Samples(c, s.samples)
		}
	}
	return nil
}

// round starts a container of each kind, and waits until all who look have seen it.
func (d *dockerd) round(ctx context.Context, sights []*engineSight, i int, polled bool) error {
	for j, kind := range []string{enginePublished, engineHost} {
		if err := pause(ctx, rand.N(300*time.Millisecond)); err != nil {
			return err
		}
		name := fmt.Sprintf("%s-%d", []string{"published", "host"}[j], i)
		k := port.Key{Protocol: port.TCP, Address: netip.MustParseAddr("127.0.0.1"), Port: uint16(20000 + 2*i + j)}
		var looking []*engineSight
		var said []<-chan time.Time
		for _, s := range sights {
			if s.kind == kind && (polled || !s.polls) {
				looking, said = append(looking, s), append(said, s.expect(k, name))
			}
		}
		id, started, err := d.run(ctx, name, k.AddrPort(), kind == engineHost)
		if err != nil {
			return err
		}
		for n, s := range looking {
			select {
			case at, ok := <-said[n]:
				if !ok {
					return fmt.Errorf("%s: %s: the engine did not answer", s.mode, name)
				}
				s.samples = append(s.samples, at.Sub(started).Seconds())
			case <-time.After(limit):
				return fmt.Errorf("%s: %s is not named within %v", s.mode, name, limit)
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		if err := d.remove(ctx, id); err != nil {
			return err
		}
	}
	return nil
}
