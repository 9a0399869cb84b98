// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/testkit/netns"
	"github.com/fairlead/fairlead/test/kit/program"
)

// metricsAddr is where the agent serves its metrics, in the guest.
const metricsAddr = "127.0.0.1:19464"

// patience bounds what must happen soon, and is the time until a difference is one that stays: on this machine,
// and in an emulated one.
const (
	patience         = time.Minute
	patienceEmulated = 15 * time.Minute // on a busy machine its verifier takes minutes for the BPF programs
)

// chaos is one run.
type chaos struct {
	ctx            context.Context //nolint:containedctx // of the run
	patience       time.Duration
	rng            *rand.Rand
	dir, program   string
	guest, outside *netns.Space
	link           *proxy
	agent, host    *process
	memory         *memoryGroup
	servers        map[endpoint]io.Closer
	rules          map[uint16]bool // redirected ports
	engines        []*engine
	faults         []fault
	flows          *flows
	log            *os.File
	result         result
}

// runChaos makes one run in the network namespace of this process. It removes what it
// made; logs remain if there was a difference.
func runChaos(ctx context.Context, seed uint64, minutes float64, engines []string, emulated bool) (result, error) {
	loads := newLoadMeter()
	c, err := newChaos(ctx, seed, engines, emulated)
	if err == nil {
		err = c.run(time.Duration(minutes * float64(time.Minute)))
	}
	c.result.Minutes = minutes
	var loadErr error
	c.result.Load, loadErr = loads.stop()
	err = errors.Join(err, loadErr)
	c.result.TCP, c.result.UDP = c.flows.stop()
	c.close(err == nil && !c.result.failed())
	return c.result, err
}

// newChaos returns what there is to close also with an error.
func newChaos(ctx context.Context, seed uint64, engines []string, emulated bool) (c *chaos, err error) {
	c = &chaos{
		ctx: ctx, patience: patience, rng: rand.New(rand.NewPCG(seed, 0)), servers: map[endpoint]io.Closer{}, rules: map[uint16]bool{},
		result: result{Seed: seed, Emulated: emulated, Engines: map[string]int{}, Faults: map[string][]time.Duration{}}, flows: newFlows(),
	}
	if emulated {
		c.patience = patienceEmulated
	}
	c.flows.patience = c.patience
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		return c, err
	}
	c.result.Kernel = unix.ByteSliceToString(name.Release[:])
	if c.dir, err = os.MkdirTemp("", "fairlead-chaos-"); err != nil {
		return c, err
	}
	if c.program, err = program.Path(c.dir); err != nil {
		return c, err
	}
	if c.log, err = os.Create(filepath.Join(c.dir, "log")); err != nil {
		return c, err
	}
	if err := errors.Join(os.Mkdir(c.state(), 0o700), unix.Mount("tmpfs", c.state(), "tmpfs", 0, "mode=700,size=1m")); err != nil {
		return c, fmt.Errorf("mount the state directory: %w", err)
	}
	if c.memory, err = newMemoryGroup(); err != nil {
		return c, err
	}
	if c.guest, err = netns.Open("/proc/thread-self/ns/net"); err != nil {
		return c, err
	}
	if c.outside, err = netns.New(); err != nil {
		return c, err
	}
	c.flows.outside = c.outside
	if _, err := c.command(nftTable, "nft", "-f", "-"); err != nil {
		return c, err
	}
	if err := c.startEngines(engines); err != nil {
		return c, err
	}
	if c.link, err = newProxy(filepath.Join(c.dir, "proxy"), filepath.Join(c.state(), "link", "s")); err != nil {
		return c, err
	}
	c.faults = c.allFaults()
	return c, errors.Join(c.startAgent(), c.startHost())
}

// state is a small file system for what agent and host keep.
func (c *chaos) state() string { return filepath.Join(c.dir, "state") }

func (c *chaos) startAgent() (err error) {
	args := []string{"agent", "--link", "unix://" + filepath.Join(c.state(), "link", "s"), "--control", filepath.Join(c.state(), "agent", "s"),
		"--metrics-addr", metricsAddr}
	sources := "socket,nat"
	for _, e := range c.engines {
		sources += "," + e.name
		args = append(args, e.flags...)
	}
	args = append(args, "--source", sources)
	if c.rng.IntN(2) == 0 {
		args = append(args, "--event-buffer", "64")
	}
	if c.agent, err = c.start(c.guest, c.program, args...); err != nil {
		return err
	}
	return c.memory.add(c.agent.PID())
}

func (c *chaos) startHost() (err error) {
	c.host, err = c.start(c.outside, c.program, "host", "--connect", "unix://"+c.link.path, "--control", filepath.Join(c.state(), "host", "s"))
	return err
}

type process = program.Process

// start starts a program that writes to the log.
func (c *chaos) start(in *netns.Space, name string, args ...string) (*process, error) {
	cmd := exec.Command(name, args...)
	cmd.Stdout, cmd.Stderr = c.log, c.log
	return program.Launch(program.Command{Cmd: cmd, In: in, Patience: patience})
}

// command runs a command in the guest with this standard input, and returns its output. An
// engine may never answer it.
func (c *chaos) command(input, name string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(c.ctx, c.patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	var out, problem bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(input), &out, &problem
	cmd.WaitDelay = time.Second
	if err := c.guest.Do(cmd.Run); err != nil {
		return "", fmt.Errorf("%s: %w: %s", cmd, err, problem.String())
	}
	return out.String(), nil
}

// differ counts a difference and reports it at once, also in the log of agent and host.
func (c *chaos) differ(format string, args ...any) {
	c.result.Differences++
	text := fmt.Sprintf(time.Now().Format("15:04:05.000 ")+format+"\n", args...)
	_, _ = os.Stderr.WriteString(text)
	_, _ = c.log.WriteString("chaos: " + text)
}

// close ends all that runs. It keeps the logs unless the run was clean.
func (c *chaos) close(clean bool) {
	for _, p := range []*process{c.agent, c.host} {
		if p != nil {
			p.Stop(syscall.SIGKILL)
		}
	}
	for _, e := range slices.Backward(c.engines) {
		e.close()
	}
	for _, s := range c.servers {
		_ = s.Close()
	}
	if c.link != nil {
		c.link.close()
	}
	if c.memory != nil {
		c.memory.close()
	}
	_ = unix.Unmount(c.state(), unix.MNT_DETACH)
	switch {
	case clean || c.ctx.Err() != nil:
		_ = os.RemoveAll(c.dir)
	case c.result.Emulated: // the file ends with the machine
		b, _ := os.ReadFile(filepath.Join(c.dir, "log"))
		_, _ = os.Stderr.Write(b[max(0, len(b)-16<<10):])
	default:
		fmt.Fprintf(os.Stderr, "logs of agent and host are in %s\n", c.dir)
	}
}

// run changes and breaks until the time is over.
func (c *chaos) run(d time.Duration) error {
	if err := c.socketChange(); err != nil { // without a port there is nothing to wait for
		return err
	}
	if err := c.converge(fault{name: "start"}); err != nil {
		return err
	}
	c.flows.start()
	for end := time.Now().Add(d); time.Now().Before(end); {
		for range 1 + c.rng.IntN(8) {
			if err := c.change(); err != nil {
				return err
			}
		}
		if err := c.breakOne(c.faults[c.rng.IntN(len(c.faults))]); err != nil {
			return err
		}
	}
	return c.ctx.Err()
}
