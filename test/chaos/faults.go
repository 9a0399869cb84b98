// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// fault breaks something, changes something meanwhile, and heals it.
type fault struct {
	name string
	do   func(pause time.Duration) error
	// mayEnd: the agent may end by itself. Who starts it starts it again, as systemd does.
	mayEnd bool
	after  func() error // once all is well
}

// leastLongStop is the least time for which a host is stopped long: its agent may or may not
// take it for gone.
const leastLongStop = 500 * time.Millisecond

func (c *chaos) allFaults() []fault {
	all := []fault{
		{name: "agent killed", do: func(time.Duration) error { return c.restart(&c.agent, syscall.SIGKILL, c.startAgent) }},
		{name: "agent restarted", do: func(time.Duration) error { return c.restart(&c.agent, syscall.SIGTERM, c.startAgent) }},
		{name: "agent stopped", do: func(pause time.Duration) error { return c.freeze(c.agent, pause, c.change) }},
		{name: "host killed", do: func(time.Duration) error { return c.restart(&c.host, syscall.SIGKILL, c.startHost) }},
		{name: "host restarted", do: func(time.Duration) error { return c.restart(&c.host, syscall.SIGTERM, c.startHost) }},
		{name: "host stopped", do: func(pause time.Duration) error { return c.freeze(c.host, pause, c.change) }},
		{name: "host stopped for 0.5 s to 6.5 s", do: func(pause time.Duration) error {
			return c.freeze(c.host, leastLongStop+4*pause, c.change)
		}},
		{name: "link cut", do: c.cut},
		{name: "link delayed", do: c.delay},
		{name: "link truncated mid-frame", do: c.truncate},
		{name: "descriptor limit", do: c.starve},
		{name: "event buffers overflowed", do: func(pause time.Duration) error { return c.freeze(c.agent, pause, c.burst) }, after: c.countLost},
		{name: "disk full", do: func(pause time.Duration) error { return c.fill(func() error { time.Sleep(pause); return c.change() }) }},
		{name: "agent started with a full disk", mayEnd: true, do: func(pause time.Duration) error {
			return c.fill(func() error {
				defer time.Sleep(pause)
				return c.restart(&c.agent, syscall.SIGKILL, c.startAgent)
			})
		}},
		{name: "memory limit", mayEnd: true, do: c.squeeze},
	}
	for _, e := range c.engines {
		all = append(all,
			fault{name: e.name + " killed", do: func(time.Duration) error { return e.restart(syscall.SIGKILL, c.change) }},
			fault{name: e.name + " restarted", do: func(time.Duration) error { return e.restart(syscall.SIGTERM, c.change) }},
			fault{name: e.name + " stopped", do: func(pause time.Duration) error { return c.freeze(e.main, pause, c.socketChange) }},
		)
	}
	return all
}

// breakOne does a fault and waits until all is well.
func (c *chaos) breakOne(f fault) error {
	err := f.do(time.Duration(c.rng.IntN(1500)) * time.Millisecond)
	if err == nil {
		err = c.converge(f)
	}
	if err == nil && f.after != nil {
		err = f.after()
	}
	if err != nil {
		return fmt.Errorf("%s: %w", f.name, err)
	}
	return nil
}

// revive starts what has ended by itself, which is a difference unless the fault allows it.
func (c *chaos) revive(f fault) error {
	if c.host.Ended() {
		c.differ("after %s: the host ended: %s", f.name, c.host.State())
		if err := c.startHost(); err != nil {
			return err
		}
	}
	if !c.agent.Ended() {
		return nil
	}
	if !f.mayEnd {
		c.differ("after %s: the agent ended: %s", f.name, c.agent.State())
	}
	return c.startAgent()
}

func (c *chaos) restart(p **process, sig os.Signal, start func() error) error {
	(*p).Stop(sig)
	if err := c.change(); err != nil {
		return err
	}
	return start()
}

// freeze stops a process, changes something, and continues it.
func (c *chaos) freeze(p *process, d time.Duration, change func() error) error {
	p.Signal(syscall.SIGSTOP)
	err := change()
	time.Sleep(d)
	p.Signal(syscall.SIGCONT)
	return err
}

// socketChange is a change that needs no engine.
func (c *chaos) socketChange() error {
	c.result.Operations++
	return c.socket("tcp", firstPort+uint16(c.rng.IntN(ports)))
}

func (c *chaos) cut(time.Duration) error {
	c.link.cut()
	return c.change()
}

func (c *chaos) delay(pause time.Duration) error {
	c.link.delay.Store(int64(20 * time.Millisecond))
	defer c.link.delay.Store(0)
	time.Sleep(pause)
	return c.change()
}

func (c *chaos) truncate(pause time.Duration) error {
	c.link.truncate.Store(true)
	defer c.link.truncate.Store(false)
	defer time.Sleep(pause)
	return c.change()
}

// starve takes all free descriptors from agent or host for a while.
func (c *chaos) starve(d time.Duration) error {
	pid := []*process{c.agent, c.host}[c.rng.IntN(2)].PID()
	var old unix.Rlimit
	err := unix.Prlimit(pid, unix.RLIMIT_NOFILE, nil, &old)
	if err == nil {
		err = unix.Prlimit(pid, unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 12, Max: old.Max}, nil)
	}
	if err != nil {
		return err
	}
	err = c.change()
	time.Sleep(d)
	return errors.Join(err, unix.Prlimit(pid, unix.RLIMIT_NOFILE, &old, nil))
}

// burst makes more events of sockets and rules than small buffers hold.
func (c *chaos) burst() error {
	err := c.guest.Do(func() error {
		for range 1500 {
			l, err := net.Listen("tcp4", "127.0.0.1:0")
			if err != nil {
				return err
			}
			_ = l.Close()
		}
		return nil
	})
	if err != nil {
		return err
	}
	var script strings.Builder
	script.WriteString("add table ip burst\nadd chain ip burst c\n")
	for port := range 1500 {
		fmt.Fprintf(&script, "add rule ip burst c tcp dport %d accept\n", port+1)
	}
	for _, s := range []string{script.String(), "delete table ip burst"} {
		if _, err := c.command(s, "nft", "-f", "-"); err != nil {
			return err
		}
	}
	return c.change()
}

// lostEvents are the agent's counters of events that the kernel had no room for.
var lostEvents = regexp.MustCompile(`(?m)^fairlead_(?:observer_drops|nat_losses)_total (\d+)`)

// countLost keeps the most that an agent counted.
func (c *chaos) countLost() error {
	conn, err := c.guest.Dial("tcp", metricsAddr)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	_ = conn.SetDeadline(time.Now().Add(patience))
	if _, err := io.WriteString(conn, "GET /metrics HTTP/1.0\r\n\r\n"); err != nil {
		return err
	}
	text, err := io.ReadAll(conn)
	if err != nil {
		return err
	}
	for _, m := range lostEvents.FindAllSubmatch(text, -1) {
		n, err := strconv.Atoi(string(m[1]))
		if err != nil {
			return err
		}
		c.result.Lost = max(c.result.Lost, n)
	}
	return nil
}

// fill leaves no byte free where agent and host keep their files.
func (c *chaos) fill(meanwhile func() error) error {
	path := filepath.Join(c.state(), "filler")
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	for err == nil {
		_, err = f.Write(make([]byte, 4096))
	}
	if errors.Is(err, syscall.ENOSPC) {
		err = meanwhile()
	}
	return errors.Join(err, f.Close(), os.Remove(path))
}

// squeeze starts the agent with little memory, which may be too little to live.
func (c *chaos) squeeze(pause time.Duration) error {
	c.agent.Stop(syscall.SIGKILL)
	if err := c.memory.limit(int64(8+c.rng.IntN(40)) << 20); err != nil {
		return err
	}
	err := c.startAgent()
	if err == nil {
		err = c.change()
	}
	time.Sleep(pause)
	return errors.Join(err, c.memory.limit(-1))
}

// memoryGroup is a cgroup, of version 1 or 2, that limits memory.
type memoryGroup struct{ dir, file, none string }

func newMemoryGroup() (*memoryGroup, error) {
	const root = "/sys/fs/cgroup"
	name := fmt.Sprintf("fairlead-chaos-%d", os.Getpid())
	g := &memoryGroup{filepath.Join(root, "memory", cgroupParent(), name), "memory.limit_in_bytes", "-1"}
	if b, err := os.ReadFile(root + "/cgroup.controllers"); err == nil && strings.Contains(string(b), "memory") {
		g = &memoryGroup{filepath.Join(root, name), "memory.max", "max"}
		if err := os.WriteFile(root+"/cgroup.subtree_control", []byte("+memory"), 0); err != nil {
			return nil, err
		}
	}
	return g, os.MkdirAll(g.dir, 0o755)
}

// limit sets the limit in bytes; -1 is none.
func (g *memoryGroup) limit(n int64) error {
	text := g.none
	if n >= 0 {
		text = fmt.Sprint(n)
	}
	return os.WriteFile(filepath.Join(g.dir, g.file), []byte(text), 0)
}

func (g *memoryGroup) add(pid int) error {
	err := os.WriteFile(filepath.Join(g.dir, "cgroup.procs"), []byte(fmt.Sprint(pid)), 0)
	if errors.Is(err, syscall.ESRCH) {
		return nil // it has ended
	}
	return err
}

func (g *memoryGroup) close() { _ = os.Remove(g.dir) }
