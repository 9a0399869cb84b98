// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/status"
	"github.com/fairlead/fairlead/test/kit/netns"
)

// mode is one way to observe.
type mode struct {
	name  string
	flags []string
	poll  time.Duration // 0 for events
}

// The names of the modes, in every part.
const (
	modeBPF   = "bpf"
	modePoll1 = "poll 1 s"
	modePoll3 = "poll 3 s"
)

// modes are fairlead's own, bpf first: all else is compared with it.
var modes = []mode{
	{modeBPF, []string{"--observer", "bpf"}, 0},
	{modePoll1, []string{"--observer", "poll", "--poll-interval", "1s"}, time.Second},
	{modePoll3, []string{"--observer", "poll", "--poll-interval", "3s"}, 3 * time.Second},
}

// guest is an agent in a namespace of its own.
type guest struct {
	space, outside *netns.Space // of the agent, and of its host
	control, link  string
	mode           mode
	agent          *exec.Cmd
	procs          []*exec.Cmd // all that runs there, the agent first
}

// newSpaces makes what an agent runs in; begin starts it. The caller closes it.
func newSpaces(dir string, m mode) (_ *guest, err error) {
	g := &guest{control: filepath.Join(dir, "control", "s"), link: "unix://" + filepath.Join(dir, "link", "s"), mode: m}
	if g.space, err = netns.New(); err != nil {
		return nil, err
	}
	if g.outside, err = netns.New(); err != nil {
		return nil, errors.Join(err, g.space.Close())
	}
	return g, nil
}

// beside is newSpaces in the guest's own namespace, with another host.
func (g *guest) beside(dir string, m mode) (*guest, error) {
	b, err := newSpaces(dir, m)
	if err != nil {
		return nil, err
	}
	same, err := netns.Open(fmt.Sprintf("/proc/self/fd/%d", g.space.FD()))
	if err != nil {
		b.close()
		return nil, err
	}
	_ = b.space.Close()
	b.space = same
	return b, nil
}

// newGuest starts an agent; it need not be ready yet. The caller closes it.
func newGuest(binary, dir string, m mode, flags ...string) (*guest, error) {
	g, err := newSpaces(dir, m)
	if err != nil {
		return nil, err
	}
	if err := g.begin(binary, flags...); err != nil {
		g.close()
		return nil, err
	}
	return g, nil
}

// begin starts the agent.
func (g *guest) begin(binary string, flags ...string) error {
	args := append([]string{"agent", "--link-token=", "--link", g.link, "--control", g.control, "--hold-down", "0s", "--log-level", "error"}, g.mode.flags...)
	err := g.start(g.space, binary, append(args, flags...)...)
	if err == nil {
		g.agent = g.procs[len(g.procs)-1]
	}
	return err
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

func (g *guest) list(ctx context.Context) (status.List, error) {
	return status.NewClient(g.control).List(ctx)
}

// readyWithin is how long an agent may take to be ready on a busy machine.
const readyWithin = 2 * time.Minute

// ready waits for the first complete sync, and until the agent observes as the
// mode says. It returns by what it observes.
func (g *guest) ready(ctx context.Context) (by string, err error) {
	for end := time.Now().Add(readyWithin); time.Now().Before(end) && ctx.Err() == nil; {
		if err := g.alive(); err != nil {
			return "", err
		}
		var l status.List
		if l, err = g.list(ctx); err == nil && l.Ready() {
			if by, err = g.observes(ctx); err == nil {
				return by, nil
			}
		}
		time.Sleep(25 * time.Millisecond)
	}
	return "", errors.Join(fmt.Errorf("the agent was not ready within %v", readyWithin), err, ctx.Err())
}

// observes returns by which mechanism the agent sees TCP listeners, as its metrics
// say. It is an error if that is not what the mode asks for: then the mode did
// not really run.
func (g *guest) observes(ctx context.Context) (string, error) {
	m, err := g.metrics(ctx)
	if err != nil {
		return "", err
	}
	for key := range m {
		rest, ok := strings.CutPrefix(key, `fairlead_observer_method_info{capability="tcp-listen",method="`)
		if !ok {
			continue
		}
		method := strings.TrimSuffix(rest, `"}`)
		if (g.mode.poll != 0) != (method == "poll") {
			return "", fmt.Errorf("the agent observes by %q: mode %q did not really run", method, g.mode.name)
		}
		return method, nil
	}
	return "", errors.New("the agent does not say how it observes")
}

// check returns an error unless the agent is alive, observes as the mode says,
// and has lost no event.
func (g *guest) check(ctx context.Context) error {
	if err := g.alive(); err != nil {
		return err
	}
	if _, err := g.observes(ctx); err != nil {
		return err
	}
	n, err := g.drops(ctx)
	if err == nil && n != 0 {
		err = fmt.Errorf("the agent lost %v events, or could not read them", n)
	}
	return err
}

func (g *guest) alive() error {
	var info unix.Siginfo
	// It is left to be waited for.
	err := unix.Waitid(unix.P_PID, g.agent.Process.Pid, &info, unix.WEXITED|unix.WNOHANG|unix.WNOWAIT, nil)
	if err != nil {
		return fmt.Errorf("the agent: %w", err)
	}
	if info.Signo != 0 {
		return errors.New("the agent has ended")
	}
	return nil
}

// drops is how many events the agent lost or could not read.
func (g *guest) drops(ctx context.Context) (float64, error) {
	m, err := g.metrics(ctx)
	return m["fairlead_observer_drops_total"] + m["fairlead_observer_malformed_total"], err
}

// metrics returns what the agent exports: values by name and labels, as written.
func (g *guest) metrics(ctx context.Context) (map[string]float64, error) {
	c := &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", g.control)
		},
	}}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://fairlead/metrics", nil)
	if err != nil {
		return nil, err
	}
	resp, err := c.Do(req)
	if err != nil {
		return nil, err
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("/metrics: %s", resp.Status)
	}
	return parseMetrics(resp.Body)
}

func parseMetrics(r io.Reader) (map[string]float64, error) {
	out := map[string]float64{}
	in := bufio.NewScanner(r)
	for in.Scan() {
		if line := in.Text(); !strings.HasPrefix(line, "#") {
			if i := strings.LastIndexByte(line, ' '); i > 0 {
				v, err := strconv.ParseFloat(line[i+1:], 64)
				if err != nil {
					return nil, fmt.Errorf("metric %q: %w", line, err)
				}
				out[line[:i]] = v
			}
		}
	}
	return out, in.Err()
}

func (g *guest) close() {
	for _, c := range g.procs {
		_ = c.Process.Signal(syscall.SIGTERM)
		_ = c.Wait()
	}
	_ = g.space.Close()
	_ = g.outside.Close()
}
