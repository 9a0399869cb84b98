// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/schedule"
	"github.com/fairlead/fairlead/internal/status"
	"github.com/fairlead/fairlead/internal/testkit/netns"
	"github.com/fairlead/fairlead/test/kit/program"
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
	{"poll-1s", []string{"--observer", "poll", "--poll-interval", "1s"}, time.Second},
	{"poll-3s", []string{"--observer", "poll", "--poll-interval", "3s"}, 3 * time.Second},
}

var ownModes = []string{modes[0].name, modes[1].name, modes[2].name}

// guest is an agent in a network namespace, and what belongs to it.
type guest struct {
	b              *bench
	mode           mode
	program        string       // the agent's
	space, outside *netns.Space // of the agent, and of its host
	dir            string
	control, link  string
	agent          *process
	peer           *peer // the other end of the link, after connect
	fds            sockets
	close          func() // called when the part ends, or before
}

// newGuest makes a guest without an agent, in a namespace that lives until the part ends.
func (b *bench) newGuest(m mode, space *netns.Space) *guest {
	g := &guest{b: b, mode: m, program: b.program, space: space, outside: b.space(), dir: b.tempDir()}
	g.control, g.link = filepath.Join(g.dir, "control", "s"), "unix://"+filepath.Join(g.dir, "link", "s")
	g.close = sync.OnceFunc(func() {
		if g.peer != nil {
			_ = g.peer.session.Close()
		}
		if g.agent != nil {
			g.agent.stop()
		}
		g.fds.close()
	})
	b.cleanup(g.close)
	return g
}

// start starts the agent.
func (g *guest) start(flags ...string) {
	// Earlier versions ask for a token unless they are told that there is none.
	args := append([]string{"agent", "--link-token=", "--link", g.link, "--control", g.control, "--hold-down", "0s", "--log-level", "error"}, g.mode.flags...)
	cmd := exec.Command(g.program, append(args, flags...)...)
	// To the agent, cgroups above that of the benchmark do not exist: by their names its processes
	// could be taken for those of containers, whose engine is waited for.
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWCGROUP}
	g.agent = g.b.start(g.space, cmd)
}

// startHost starts a host peer.
func (g *guest) startHost() *process {
	return g.b.start(g.outside, exec.Command(g.b.program, "host", "--link-token=", "--connect", g.link,
		"--control", filepath.Join(g.dir, "host", "s"), "--max-listeners", "20000", "--log-level", "error"))
}

// process is a program that runs until it is stopped.
type process struct{ *program.Process }

// start starts a program in a namespace. It is stopped when the part ends, or before.
func (b *bench) start(in *netns.Space, cmd *exec.Cmd) *process {
	if cmd.Stderr == nil {
		cmd.Stdout, cmd.Stderr = b.log, b.log
	}
	p := &process{must(program.Launch(program.Command{Cmd: cmd, In: in, Patience: 10 * time.Second}))}
	b.cleanup(p.stop)
	return p
}

func (p *process) stop() { p.Stop(syscall.SIGTERM) }

// used reads what the process has used.
func (p *process) used() usage.Usage { return must(usage.Of(p.PID())) }

// ready waits until the agent has synced and observes as the mode says.
func (g *guest) ready(ctx context.Context) {
	err := eventually(ctx, func() error {
		select {
		case <-g.agent.Done():
			check(fmt.Errorf("%s: the agent has ended", g.mode.name))
		default:
		}
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
		check(fmt.Errorf("%s: %w", g.mode.name, err))
	}
}

// observes records the method by which the agent observes sockets. It is an error if
// that is not the mode's.
func (g *guest) observes(l status.List) error {
	if !hasMethods(l) {
		return nil
	}
	method := methodOf(l, "socket")
	if method == "" || (g.mode.poll != 0) != strings.Contains(method, "poll") {
		return fmt.Errorf("the agent observes by %q, which is not mode %q", method, g.mode.name)
	}
	g.b.method(g.mode.name, method)
	return nil
}

// hasMethods reports whether an agent reports its methods. Early versions do not.
func hasMethods(l status.List) bool {
	return slices.ContainsFunc(l.Sources, func(s status.Source) bool { return s.Method != "" })
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
func (g *guest) connect(ctx context.Context) {
	g.ready(ctx)
	g.peer = must(newPeer(ctx, g.link))
}

// guest starts a guest with n listeners and connects to it.
func (b *bench) guest(ctx context.Context, m mode, n int) *guest {
	g := b.newGuest(m, b.space())
	g.start()
	g.connect(ctx)
	g.fill(n)
	g.peer.settle(ctx, n)
	return g
}

// each starts a guest with n listeners in each mode, and then calls f for all of them at
// the same time.
func (b *bench) each(ctx context.Context, n int, rest time.Duration, f func(context.Context, *guest)) {
	var all []*guest
	for _, m := range modes {
		all = append(all, b.guest(ctx, m, n))
	}
	check(schedule.Sleep(ctx, rest)) // for what the start left to do
	together(ctx, all, func(ctx context.Context, g *guest) {
		f(ctx, g)
		g.check(ctx)
	})
}

// check fails unless the agent observes as the mode says, and has lost no event. A hook that
// the kernel skipped, because it ran on that CPU already, is no failure: the agent reads the
// state again, and what that takes is part of what is measured.
func (g *guest) check(ctx context.Context) {
	check(g.observes(must(status.NewClient(g.control).List(ctx))))
	m := g.metrics(ctx)
	lost := m["fairlead_observer_drops_total"] - m["fairlead_observer_skipped_total"]
	if n := lost + m["fairlead_observer_malformed_total"]; n != 0 {
		check(fmt.Errorf("%s: the agent lost %v events, or could not decode them", g.mode.name, n))
	}
}

// metrics returns the agent's metrics: values by name and labels, as written.
func (g *guest) metrics(ctx context.Context) map[string]float64 {
	dial := func() (net.Conn, error) { return net.Dial("unix", g.control) }
	out := map[string]float64{}
	for line := range strings.Lines(must(fetch(ctx, dial, "GET", "/metrics", ""))) {
		if i := strings.LastIndexByte(line, ' '); i > 0 {
			out[line[:i]], _ = strconv.ParseFloat(strings.TrimSpace(line[i+1:]), 64) // a comment is no number
		}
	}
	return out
}

// fetch returns the body of an answer, which must be a success.
func fetch(ctx context.Context, dial func() (net.Conn, error), method, path, body string) (string, error) {
	c := http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext:       func(context.Context, string, string) (net.Conn, error) { return dial() },
	}}
	req := must(http.NewRequestWithContext(ctx, method, "http://127.0.0.1"+path, strings.NewReader(body)))
	resp, err := c.Do(req)
	if err != nil {
		return "", err
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	if resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s %s: %s: %.300s", method, path, resp.Status, b)
	}
	return string(b), err
}

// sockets are open until they are closed.
type sockets []int

func (s *sockets) close() {
	for _, fd := range *s {
		_ = unix.Close(fd)
	}
	*s = nil
}

// firstPort is the first port of fill. Ports that engines use (10250 is the kubelet's)
// are below: they wait for their owner if the benchmark runs in a container.
const firstPort = 11_000

// fill opens n listeners as fast as one thread can, and returns when the last call
// returned. They are closed with the guest.
func (g *guest) fill(n int) (returned time.Time) {
	inside(g.space, func() {
		for i := range n {
			var fd int
			fd, returned = openSocket(tcpKey(firstPort + uint16(i)))
			g.fds = append(g.fds, fd)
		}
	})
	return returned
}

// fillBoth is fill with listeners that take both families.
func (g *guest) fillBoth(n int) {
	inside(g.space, func() {
		for i := range n {
			fd := must(unix.Socket(unix.AF_INET6, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0))
			g.fds = append(g.fds, fd)
			check(unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 0))
			check(unix.Bind(fd, &unix.SockaddrInet6{Port: firstPort + i}))
			check(unix.Listen(fd, 8))
		}
	})
}

// open makes a listener or a bound UDP socket in the guest.
func (g *guest) open(k port.Key) (fd int, returned time.Time) {
	inside(g.space, func() { fd, returned = openSocket(k) })
	return fd, returned
}

// openSocket uses bare system calls, so that the time is that of the return of listen(2)
// or bind(2).
func openSocket(k port.Key) (fd int, returned time.Time) {
	kind := unix.SOCK_STREAM
	if k.Protocol == port.UDP {
		kind = unix.SOCK_DGRAM
	}
	fd = must(unix.Socket(unix.AF_INET, kind|unix.SOCK_CLOEXEC, 0))
	err := unix.Bind(fd, &unix.SockaddrInet4{Port: int(k.Port), Addr: k.Address.As4()})
	if err == nil && kind == unix.SOCK_STREAM {
		err = unix.Listen(fd, 8)
	}
	returned = time.Now()
	if err != nil {
		_ = unix.Close(fd)
		check(fmt.Errorf("open %s: %w", k, err))
	}
	return fd, returned
}
