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
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/status"
	"github.com/fairlead/fairlead/test/kit/netns"
	"github.com/fairlead/fairlead/test/kit/usage"
)

const modeBPF = "bpf"

// mode is one way for an agent to observe sockets.
type mode struct {
	name  string
	flags []string
	poll  time.Duration // 0 for events
}

// modes are fairlead's own. All others are compared with the first.
var modes = []mode{
	{modeBPF, []string{"--observer", "bpf"}, 0},
	{"poll 1 s", []string{"--observer", "poll", "--poll-interval", "1s"}, time.Second},
	{"poll 3 s", []string{"--observer", "poll", "--poll-interval", "3s"}, 3 * time.Second},
}

var ownModes = []string{modes[0].name, modes[1].name, modes[2].name}

// guest is an agent in a network namespace, and what belongs to it.
type guest struct {
	b              *bench
	mode           mode
	space, outside *netns.Space // of the agent, and of its host
	dir            string
	control, link  string
	agent          *exec.Cmd
	peer           *peer // the other end of the link, after connect
	ended          chan struct{}
	procs          []*exec.Cmd // the agent is the first
	fds            sockets
	close          func() // called when the part ends, or before
}

// newGuest makes a guest without an agent. space is its namespace, which it closes; nil
// makes one.
func (b *bench) newGuest(m mode, space *netns.Space) (_ *guest, err error) {
	g := &guest{b: b, mode: m, space: space, ended: make(chan struct{})}
	g.close = sync.OnceFunc(g.end)
	b.cleanup(g.close)
	if g.space == nil {
		g.space, err = netns.New()
	}
	if err == nil {
		g.outside, err = netns.New()
	}
	if err == nil {
		g.dir, err = b.tempDir()
	}
	g.control, g.link = filepath.Join(g.dir, "control", "s"), "unix://"+filepath.Join(g.dir, "link", "s")
	return g, err
}

func (g *guest) end() {
	if g.peer != nil {
		_ = g.peer.session.Close()
	}
	for i, c := range g.procs {
		_ = c.Process.Signal(syscall.SIGTERM)
		if i == 0 {
			<-g.ended
		} else {
			_ = c.Wait()
		}
	}
	g.fds.close()
	for _, s := range []*netns.Space{g.space, g.outside} {
		if s != nil {
			_ = s.Close()
		}
	}
}

// start starts the agent.
func (g *guest) start(flags ...string) error {
	args := append([]string{"agent", "--link-token=", "--link", g.link, "--control", g.control, "--hold-down", "0s", "--log-level", "error"}, g.mode.flags...)
	cmd, err := g.run(g.space, append(args, flags...)...)
	if err != nil {
		return err
	}
	g.agent = cmd
	go func() {
		_ = cmd.Wait()
		close(g.ended)
	}()
	return nil
}

// startHost starts a host peer.
func (g *guest) startHost() error {
	_, err := g.run(g.outside, "host", "--link-token=", "--connect", g.link, "--control", filepath.Join(g.dir, "host", "s"), "--log-level", "error")
	return err
}

// run starts fairlead in a namespace.
func (g *guest) run(in *netns.Space, args ...string) (*exec.Cmd, error) {
	cmd := exec.Command(g.b.program, args...)
	cmd.Stdout, cmd.Stderr = g.b.log, g.b.log
	if err := in.Start(cmd); err != nil {
		return nil, err
	}
	g.procs = append(g.procs, cmd)
	return cmd, nil
}

// ready waits until the agent has synced and observes as the mode says.
func (g *guest) ready(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	go func() {
		select {
		case <-g.ended:
			cancel(errors.New("the agent has ended"))
		case <-ctx.Done():
		}
	}()
	err := eventually(ctx, func() error {
		l, err := status.NewClient(g.control).List(ctx)
		if err == nil && !l.Ready() {
			err = errors.New("the agent has not synced")
		}
		if err == nil {
			err = g.observes(l)
		}
		return err
	})
	if err != nil {
		err = errors.Join(err, context.Cause(ctx))
	}
	return err
}

// observes records the method by which the agent observes sockets. It is an error if
// that is not the mode's.
func (g *guest) observes(l status.List) error {
	method := methodOf(l, "socket")
	if method == "" || (g.mode.poll != 0) != strings.Contains(method, "poll") {
		return fmt.Errorf("the agent observes by %q, which is not mode %q", method, g.mode.name)
	}
	g.b.method(g.mode.name, method)
	return nil
}

// methodOf returns the method of a live source.
func methodOf(l status.List, source string) string {
	for _, s := range l.Sources {
		if s.Name == source && s.State == "live" {
			return s.Method
		}
	}
	return ""
}

// connect waits until the agent is ready, and connects to its link.
func (g *guest) connect(ctx context.Context) (err error) {
	if err := g.ready(ctx); err != nil {
		return err
	}
	g.peer, err = newPeer(ctx, g.link)
	return err
}

// guest starts a guest with n listeners and connects to it.
func (b *bench) guest(ctx context.Context, m mode, n int, flags ...string) (*guest, error) {
	g, err := b.newGuest(m, nil)
	if err == nil {
		err = g.start(flags...)
	}
	if err == nil {
		err = g.connect(ctx)
	}
	if err == nil {
		_, err = g.fill(n)
	}
	if err == nil {
		_, err = g.peer.settle(ctx, n)
	}
	return g, err
}

// each starts a guest with n listeners in each mode, and calls f for all of them at the
// same time.
func (b *bench) each(ctx context.Context, n int, rest time.Duration, f func(context.Context, *guest) error) error {
	var all []*guest
	for _, m := range modes {
		g, err := b.guest(ctx, m, n)
		if err != nil {
			return fmt.Errorf("%s: %w", m.name, err)
		}
		all = append(all, g)
	}
	time.Sleep(rest) // for what the start left to do
	return together(ctx, all, f)
}

// together calls f for all guests at the same time, and checks them.
func together(ctx context.Context, all []*guest, f func(context.Context, *guest) error) error {
	group, ctx := errgroup.WithContext(ctx)
	for _, g := range all {
		group.Go(func() error {
			if err := errors.Join(f(ctx, g), g.check(ctx)); err != nil {
				return fmt.Errorf("%s: %w", g.mode.name, err)
			}
			return nil
		})
	}
	return group.Wait()
}

// used reads what the agent has used.
func (g *guest) used() (usage.Usage, error) { return usage.Of(g.agent.Process.Pid) }

// check returns an error unless the agent observes as the mode says, and has lost no
// event.
func (g *guest) check(ctx context.Context) error {
	l, err := status.NewClient(g.control).List(ctx)
	if err == nil {
		err = g.observes(l)
	}
	if err != nil {
		return err
	}
	m, err := g.metrics(ctx)
	if n := m["fairlead_observer_drops_total"] + m["fairlead_observer_malformed_total"]; err == nil && n != 0 {
		err = fmt.Errorf("the agent lost %v events, or could not decode them", n)
	}
	return err
}

// metrics returns the agent's metrics: values by name and labels, as written.
func (g *guest) metrics(ctx context.Context) (map[string]float64, error) {
	out := map[string]float64{}
	err := g.get(ctx, "http://fairlead/metrics", "", func(body io.Reader) error {
		in := bufio.NewScanner(body)
		for in.Scan() {
			i := strings.LastIndexByte(in.Text(), ' ')
			if v, err := strconv.ParseFloat(in.Text()[i+1:], 64); err == nil && i > 0 {
				out[in.Text()[:i]] = v
			}
		}
		return in.Err()
	})
	return out, err
}

// get asks the agent: the host "fairlead" is its control socket.
func (g *guest) get(ctx context.Context, url, token string, f func(io.Reader) error) error {
	c := &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
			if strings.HasPrefix(addr, "fairlead:") {
				return new(net.Dialer).DialContext(ctx, "unix", g.control)
			}
			return g.space.Dial(network, addr)
		},
	}}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	req.Header.Set("Authorization", "Bearer "+token)
	resp, err := c.Do(req)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", url, resp.Status)
	}
	return f(resp.Body)
}

// sockets are open until they are closed.
type sockets []int

func (s sockets) close() {
	for _, fd := range s {
		_ = unix.Close(fd)
	}
}

// firstPort is the first port of fill.
const firstPort = 10_000

// fill opens n listeners as fast as one thread can, and returns when the last call
// returned. They are closed with the guest.
func (g *guest) fill(n int) (returned time.Time, err error) {
	err = g.space.Do(func() error {
		for i := range n {
			var fd int
			if fd, returned, err = openSocket(tcpKey(firstPort + uint16(i))); err != nil {
				return err
			}
			g.fds = append(g.fds, fd)
		}
		return nil
	})
	return returned, err
}

// open makes a listener or a bound UDP socket in the guest.
func (g *guest) open(k port.Key) (fd int, returned time.Time, err error) {
	err = g.space.Do(func() error {
		fd, returned, err = openSocket(k)
		return err
	})
	return fd, returned, err
}

// openSocket uses bare system calls, so that the time is that of the return of listen(2)
// or bind(2).
func openSocket(k port.Key) (fd int, returned time.Time, err error) {
	kind := unix.SOCK_STREAM
	if k.Protocol == port.UDP {
		kind = unix.SOCK_DGRAM
	}
	if fd, err = unix.Socket(unix.AF_INET, kind|unix.SOCK_CLOEXEC, 0); err != nil {
		return -1, returned, err
	}
	err = unix.Bind(fd, &unix.SockaddrInet4{Port: int(k.Port), Addr: k.Address.As4()})
	if err == nil && kind == unix.SOCK_STREAM {
		err = unix.Listen(fd, 8)
	}
	returned = time.Now()
	if err != nil {
		_ = unix.Close(fd)
		return -1, returned, fmt.Errorf("open %s: %w", k, err)
	}
	return fd, returned, nil
}
