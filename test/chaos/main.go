// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Chaos runs a real agent and a real host peer in network namespaces, changes sockets
// and NAT rules at random, and breaks processes and the link between them. After each
// fault it reads from the kernel what guests serve and what the host listens at, and
// counts every difference that stays. Every flow carries its length and a checksum: one
// that is cut must end by an error, never like a complete one.
//
//	go run ./test/chaos [-seed 1] [-minutes 3] [-report docs/reliability.md]
package main

import (
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/test/kit/netns"
	"github.com/fairlead/fairlead/test/kit/program"
)

const (
	firstPort, ports = 20000, 24
	patience         = 60 * time.Second // until a difference is one that stays
)

func main() {
	seed := flag.Uint64("seed", 1, "seed of the random operations")
	minutes := flag.Float64("minutes", 3, "how long to run")
	report := flag.String("report", "", "document to write the result into, between its markers")
	flag.Parse()
	c, err := newChaos(*seed)
	if err == nil {
		err = c.run(time.Duration(*minutes * float64(time.Minute)))
	}
	c.close(err == nil)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	text := c.text(*seed, *minutes)
	fmt.Print(text)
	if *report != "" {
		if err := write(*report, text); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	if c.differences > 0 || c.flows.bad.Load() > 0 {
		os.Exit(1)
	}
}

// chaos is one run.
type chaos struct {
	rng            *rand.Rand
	dir, program   string
	guest, outside *netns.Space
	link           *proxy
	agent, host    *exec.Cmd
	servers        map[netip.AddrPort]*server
	rules          map[uint16]uint16 // redirected ports
	flows          *flows
	log            *os.File

	operations  int
	faults      map[string]int
	differences int
	times       []time.Duration // from the end of a fault to no difference
	slowest     map[string]time.Duration
}

// newChaos returns what there is to close also with an error.
func newChaos(seed uint64) (c *chaos, err error) {
	c = &chaos{
		rng: rand.New(rand.NewPCG(seed, 0)), servers: map[netip.AddrPort]*server{}, rules: map[uint16]uint16{},
		faults: map[string]int{}, slowest: map[string]time.Duration{},
	}
	if c.dir, err = os.MkdirTemp("", "fairlead-chaos-"); err != nil {
		return c, err
	}
	if c.program, err = program.Path(c.dir); err != nil {
		return c, err
	}
	if c.log, err = os.Create(filepath.Join(c.dir, "log")); err != nil {
		return c, err
	}
	if c.guest, err = netns.New(); err != nil {
		return c, err
	}
	if c.outside, err = netns.New(); err != nil {
		return c, err
	}
	if c.link, err = newProxy(filepath.Join(c.dir, "proxy"), filepath.Join(c.dir, "link", "s")); err != nil {
		return c, err
	}
	c.flows = newFlows(c.outside)
	return c, errors.Join(c.startAgent(), c.startHost())
}

func (c *chaos) startAgent() (err error) {
	c.agent, err = c.start(c.guest, "agent", "--link", "unix://"+filepath.Join(c.dir, "link", "s"), "--control", filepath.Join(c.dir, "agent", "s"))
	return err
}

func (c *chaos) startHost() (err error) {
	c.host, err = c.start(c.outside, "host", "--connect", "unix://"+c.link.path, "--control", filepath.Join(c.dir, "host", "s"))
	return err
}

func (c *chaos) start(in *netns.Space, args ...string) (*exec.Cmd, error) {
	cmd := exec.Command(c.program, args...)
	cmd.Stdout, cmd.Stderr = c.log, c.log
	return cmd, in.Start(cmd)
}

// close ends all that runs. It keeps the logs unless the run was without fault.
func (c *chaos) close(clean bool) {
	if c.flows != nil {
		c.flows.stop()
	}
	for _, p := range []*exec.Cmd{c.agent, c.host} {
		if p != nil && p.Process != nil {
			_ = p.Process.Kill()
			_ = p.Wait()
		}
	}
	for _, s := range c.servers {
		s.close()
	}
	if c.link != nil {
		c.link.close()
	}
	if clean && c.differences == 0 && c.flows.bad.Load() == 0 {
		_ = os.RemoveAll(c.dir)
	} else {
		fmt.Fprintf(os.Stderr, "logs of agent and host are in %s\n", c.dir)
	}
}

// run changes and breaks until the time is over.
func (c *chaos) run(d time.Duration) error {
	if err := c.converge("start"); err != nil {
		return err
	}
	c.flows.start(c.servers)
	for end := time.Now().Add(d); time.Now().Before(end); {
		for range 1 + c.rng.IntN(8) {
			if err := c.change(); err != nil {
				return err
			}
		}
		name, err := c.fault()
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		c.faults[name]++
		if err := c.converge(name); err != nil {
			return err
		}
	}
	return nil
}

// change opens or closes a server, or changes a NAT rule.
func (c *chaos) change() error {
	c.operations++
	port := uint16(firstPort + c.rng.IntN(ports))
	switch c.rng.IntN(8) {
	case 0:
		return c.redirect(port)
	default:
		at := netip.AddrPortFrom(netip.MustParseAddr([]string{"0.0.0.0", "127.0.0.1", "::1"}[c.rng.IntN(3)]), port)
		if s := c.servers[at]; s != nil {
			s.close()
			delete(c.servers, at)
			return nil
		}
		s, err := newServer(c.guest, at)
		if errors.Is(err, syscall.EADDRINUSE) {
			return nil
		}
		if err == nil {
			c.servers[at] = s
		}
		return err
	}
}

// redirect adds or removes a NAT rule from a port of its own to a random one.
func (c *chaos) redirect(to uint16) error {
	from := to + 1000
	action := "-A"
	if _, ok := c.rules[from]; ok {
		action = "-D"
		delete(c.rules, from)
	} else {
		c.rules[from] = to
	}
	for _, chain := range []string{"PREROUTING", "OUTPUT"} {
		cmd := exec.Command("iptables", "-w", "-t", "nat", action, chain, "-p", "tcp", "-m", "addrtype", "--dst-type", "LOCAL",
			"--dport", fmt.Sprint(from), "-j", "REDIRECT", "--to-ports", fmt.Sprint(to))
		if err := c.guest.Start(cmd); err != nil {
			return err
		}
		if err := cmd.Wait(); err != nil {
			return fmt.Errorf("%s: %w", cmd, err)
		}
	}
	return nil
}

// fault breaks something, changes something meanwhile, and heals it.
func (c *chaos) fault() (string, error) {
	pause := time.Duration(c.rng.IntN(1500)) * time.Millisecond
	switch c.rng.IntN(10) {
	case 0:
		return "agent killed", c.restart(&c.agent, syscall.SIGKILL, c.startAgent)
	case 1:
		return "host killed", c.restart(&c.host, syscall.SIGKILL, c.startHost)
	case 2:
		return "agent restarted", c.restart(&c.agent, syscall.SIGTERM, c.startAgent)
	case 3:
		return "host restarted", c.restart(&c.host, syscall.SIGTERM, c.startHost)
	case 4:
		return "agent stopped", c.freeze(c.agent, pause)
	case 5:
		return "host stopped", c.freeze(c.host, pause)
	case 6:
		c.link.cut()
		return "link cut", c.change()
	case 7:
		c.link.delay.Store(int64(20 * time.Millisecond))
		time.Sleep(pause)
		err := c.change()
		c.link.delay.Store(0)
		return "link delayed", err
	case 8:
		c.link.truncate.Store(true)
		err := c.change()
		time.Sleep(pause)
		c.link.truncate.Store(false)
		return "link truncated mid-frame", err
	}
	return "descriptor limit", c.starve(pause)
}

func (c *chaos) restart(p **exec.Cmd, sig os.Signal, start func() error) error {
	_ = (*p).Process.Signal(sig)
	_ = (*p).Wait()
	if err := c.change(); err != nil {
		return err
	}
	return start()
}

func (c *chaos) freeze(p *exec.Cmd, d time.Duration) error {
	_ = p.Process.Signal(syscall.SIGSTOP)
	err := c.change()
	time.Sleep(d)
	return errors.Join(err, p.Process.Signal(syscall.SIGCONT))
}

// starve takes all free descriptors from agent or host for a while.
func (c *chaos) starve(d time.Duration) error {
	pid := []int{c.agent.Process.Pid, c.host.Process.Pid}[c.rng.IntN(2)]
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

// converge waits until the host listens at what the guest serves, by the kernel's word.
func (c *chaos) converge(after string) error {
	healed := time.Now()
	var missing, extra []string
	for time.Since(healed) < patience {
		served, err := listening(c.guest)
		if err != nil {
			return err
		}
		shown, err := listening(c.outside)
		if err != nil {
			return err
		}
		missing, extra = diff(c.expected(served), shown), diff(shown, c.expected(served))
		if len(missing)+len(extra) == 0 {
			took := time.Since(healed)
			c.times = append(c.times, took)
			c.slowest[after] = max(c.slowest[after], took)
			return nil
		}
		time.Sleep(2 * time.Millisecond)
	}
	c.differences += len(missing) + len(extra)
	fmt.Fprintf(os.Stderr, "after %s: missing %v, not served %v\n", after, missing, extra)
	return nil
}

// expected are the host addresses of what is served in the guest.
func (c *chaos) expected(served map[netip.AddrPort]bool) map[netip.AddrPort]bool {
	want := map[netip.AddrPort]bool{}
	for a := range served {
		if lo := "127.0.0.1"; a.Addr().Is4() {
			want[netip.AddrPortFrom(netip.MustParseAddr(lo), a.Port())] = true
		} else {
			want[netip.AddrPortFrom(netip.IPv6Loopback(), a.Port())] = true
		}
	}
	for from := range c.rules { // a port that a rule opens is shown though nobody may serve it
		want[netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), from)] = true
	}
	return want
}

func diff(a, b map[netip.AddrPort]bool) (out []string) {
	for k := range a {
		if !b[k] {
			out = append(out, k.String())
		}
	}
	slices.Sort(out)
	return out
}

// text is the report.
func (c *chaos) text(seed uint64, minutes float64) string {
	var b strings.Builder
	slices.Sort(c.times)
	at := func(p float64) time.Duration {
		if len(c.times) == 0 {
			return 0
		}
		return c.times[min(len(c.times)-1, int(p*float64(len(c.times))))].Round(time.Millisecond)
	}
	total := 0
	for _, n := range c.faults {
		total += n
	}
	fmt.Fprintf(&b, "Seed %d, %g minutes: %d operations, %d faults, %d differences. Flows: %d complete, %d cut and seen as cut, %d wrong.\n",
		seed, minutes, c.operations, total, c.differences, c.flows.complete.Load(), c.flows.cut.Load(), c.flows.bad.Load())
	fmt.Fprintf(&b, "Converged after a fault: p50 %s, p99 %s, at most %s.\n\n| fault | times | slowest |\n|---|---|---|\n", at(.5), at(.99), at(1))
	for _, name := range slices.Sorted(maps.Keys(c.faults)) {
		fmt.Fprintf(&b, "| %s | %d | %s |\n", name, c.faults[name], c.slowest[name].Round(time.Millisecond))
	}
	return b.String()
}

const begin, end = "<!-- chaos: written by test/chaos -->\n", "<!-- chaos: end -->\n"

// write replaces what is between the markers of a document.
func write(path, text string) error {
	old, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	head, rest, ok := strings.Cut(string(old), begin)
	_, tail, ok2 := strings.Cut(rest, end)
	if !ok || !ok2 {
		return fmt.Errorf("%s has no markers %q and %q", path, begin, end)
	}
	return os.WriteFile(path, []byte(head+begin+text+end+tail), 0o644)
}
