// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/schedule"
	"github.com/fairlead/fairlead/test/kit/usage"
)

const (
	idleCost   = "Idle"
	changeCost = "Change"
	burstDone  = "Burst"
	udpCost    = "UDPBinds"
	startTime  = "Start"
	binarySize = "Binary"
)

// idleSizes are numbers of listeners, and of NAT rules.
var idleSizes = []int{0, 1000, 10_000}

func idlePart() part {
	return part{"idle", "idle", []measure{
		{name: idleCost, title: "an idle agent: CPU, seconds with a wake-up, memory", unit: "%", modes: ownModes, sizes: idleSizes, sizeUnit: "listeners and rules"},
	}, idle}
}

// idler is an agent that is left alone.
type idler struct {
	*guest
	size   int
	dumps  dumps // when it was ready
	before usage.Usage
	last   int64 // context switches a second ago
	awake  int   // seconds in which there were any
}

func idle(ctx context.Context, b *bench) {
	var all []*idler
	for _, n := range b.sizes(idleSizes) {
		for _, m := range modes {
			all = append(all, &idler{guest: b.busyGuest(ctx, m, n), size: n})
		}
	}
	for _, i := range all {
		i.dumps = i.dumped(ctx)
	}
	rest, lasts := b.lasting(75*time.Second, 10*time.Second, time.Second), b.lasting(2*time.Minute, 20*time.Second, time.Second)
	b.progress("leaving %d agents alone for %v, then watching them for %v", len(all), rest, lasts)
	check(schedule.Sleep(ctx, rest))
	for _, i := range all {
		i.before = i.agent.used()
		i.last = i.before.Switches
	}
	for range int(lasts / time.Second) {
		check(schedule.Sleep(ctx, time.Second))
		for _, i := range all {
			if now := i.agent.used(); now.Switches != i.last {
				i.last = now.Switches
				i.awake++
			}
		}
	}
	for _, i := range all {
		i.record(ctx)
	}
}

// busyGuest starts a guest with n listeners and n NAT rules.
func (b *bench) busyGuest(ctx context.Context, m mode, n int) *guest {
	g := b.guest(ctx, m, n)
	if n > 0 {
		g.handOver()
		newNATTable(b, g.space, n)
		g.peer.settle(ctx, 2*n) // a rule opens a port at the wildcard address
	}
	return g
}

// handOver makes another process hold the listeners of the guest: one process cannot
// have as many open files as all guests need.
func (g *guest) handOver() {
	cmd := exec.Command("sleep", "infinity")
	for _, fd := range g.fds {
		cmd.ExtraFiles = append(cmd.ExtraFiles, os.NewFile(uintptr(fd), "listener"))
	}
	g.b.start(g.space, cmd)
	g.fds = nil
	for _, f := range cmd.ExtraFiles {
		_ = f.Close()
	}
}

func (i *idler) record(ctx context.Context) {
	now := i.agent.used()
	i.check(ctx)
	cpu := now.Core(i.before)
	if i.mode.poll == 0 {
		cpu += i.dumped(ctx).longTerm(i.dumps, now.At.Sub(i.before.At))
	}
	awake := float64(i.awake) / now.At.Sub(i.before.At).Minutes()
	i.b.add(idleCost, i.mode.name, i.size, memory(now), values{"%": cpu, "awake-sec/min": awake})
}

// memory returns what a process has of it.
func memory(u usage.Usage) values {
	return values{"RSS-B": float64(u.RSS), "anonymous-B": float64(u.Anon)}
}

// dumps are an agent's dumps of all sockets.
type dumps struct{ n, seconds float64 }

func (g *guest) dumped(ctx context.Context) dumps {
	m := g.metrics(ctx)
	return dumps{m[`fairlead_observer_dumps_total{result="ok"}`], m["fairlead_observer_dump_seconds_total"]}
}

// longTerm is the share of a core, in percent, that background dumps take in the long
// term, by those since before. See observer.Options.Audit for how often they come. It is 0
// if they come so often that the window has its share of them.
func (d dumps) longTerm(before dumps, window time.Duration) float64 {
	n := d.n - before.n
	if n == 0 {
		return 0
	}
	one := (d.seconds - before.seconds) / n
	interval := max(60, min(30_000*one, 600))
	if interval <= window.Seconds() {
		return 0
	}
	return 100 * one / interval
}

// rates of changes per second, with a hundred listeners open.
var rates = []int{1, 100, 10_000}

func churnPart() part {
	return part{"churn", "churn", []measure{
		{name: changeCost, title: "CPU for each change", unit: "sec", modes: ownModes, sizes: rates, sizeUnit: "changes per second"},
	}, func(ctx context.Context, b *bench) {
		var alone sync.Mutex // held at the highest rate, which is too much for all modes at once
		b.each(ctx, 0, 3*time.Second, func(ctx context.Context, g *guest) {
			for _, rate := range b.sizes(rates) {
				for range b.of(3, 1, 1) {
					g.churn(ctx, rate, &alone)
				}
			}
		})
	}}
}

func (g *guest) churn(ctx context.Context, rate int, alone *sync.Mutex) {
	lasts := g.b.lasting(5*time.Second, 3*time.Second, time.Second)
	if rate == 1 {
		lasts *= 2
	}
	if rate >= 10_000 {
		alone.Lock()
		defer alone.Unlock()
	}
	before := g.agent.used()
	total := int(float64(rate) * lasts.Seconds())
	ports := g.change(ctx, rate, total)
	g.peer.settle(ctx, len(ports), ports...)
	g.b.add(changeCost, g.mode.name, rate, values{"sec": (g.agent.used().CPU - before.CPU).Seconds() / float64(total)})
	g.fds.close()
	g.peer.settle(ctx, 0)
}

// change opens and closes listeners at a rate. It returns the ports that are still open.
func (g *guest) change(ctx context.Context, rate, total int) (ports []uint16) {
	inside(g.space, func() {
		begin := time.Now()
		next := uint16(0)
		for i := 0; i < total; {
			// Several changes may be due at once, because a sleep takes a millisecond.
			for due := min(total, 1+int(float64(rate)*time.Since(begin).Seconds())); i < due; i++ {
				if len(g.fds) > 100 || i%2 == 1 && rate < 100 {
					_ = unix.Close(g.fds[0])
					g.fds, ports = g.fds[1:], ports[1:]
					continue
				}
				port := firstPort + next%20_000
				next++
				fd, _ := openSocket(tcpKey(port))
				g.fds, ports = append(g.fds, fd), append(ports, port)
			}
			check(schedule.Sleep(ctx, max(time.Millisecond, time.Until(begin.Add(time.Duration(i)*time.Second/time.Duration(rate))))))
		}
	})
	return ports
}

var bursts = []int{2000, 10_000}

func burstPart() part {
	return part{"burst", "churn", []measure{
		{name: burstDone, title: "burst: last listener opened → all at the other end of the link", unit: "sec", modes: ownModes, sizes: bursts, sizeUnit: "listeners"},
	}, func(ctx context.Context, b *bench) {
		b.turns(b.sizes(bursts), b.of(3, 1, 1), modes, func(m mode, n int) { b.burst(ctx, m, n) })
	}}
}

// turns calls f for each size and each mode, in rounds in which modes take turns.
func (b *bench) turns(sizes []int, rounds int, modes []mode, f func(m mode, n int)) {
	for _, n := range sizes {
		for range rounds {
			for _, m := range modes {
				f(m, n)
			}
		}
	}
}

// burst opens many listeners at once beside a new agent.
func (b *bench) burst(ctx context.Context, m mode, n int) {
	g := b.guest(ctx, m, 0)
	defer g.close()
	check(schedule.Sleep(ctx, 500*time.Millisecond)) // what the start left to do
	before := g.agent.used()
	ended := g.fill(n)
	last := g.peer.settle(ctx, n)                    // all of them: it fails if one was lost
	check(schedule.Sleep(ctx, 200*time.Millisecond)) // acknowledgements
	after := g.agent.used()
	b.add(burstDone, m.name, n, memory(after), seconds(max(last.Sub(ended), 0)), values{"CPU-sec": (after.CPU - before.CPU).Seconds()})
	g.check(ctx)
}

func udpPart() part {
	return part{"udp", "churn", []measure{
		{name: udpCost, title: "200 short-lived UDP binds per second beside 1,000 listeners: CPU", unit: "%", modes: ownModes},
	}, func(ctx context.Context, b *bench) {
		lasts := b.lasting(10*time.Second, 5*time.Second, time.Second)
		b.each(ctx, b.of(1000, 1000, 100), time.Second, func(_ context.Context, g *guest) {
			g.bindUDP(lasts / 5) // until the agent batches
			before := g.agent.used()
			g.bindUDP(lasts)
			b.add(udpCost, g.mode.name, 0, values{"%": g.agent.used().Core(before)})
		})
	}}
}

// bindUDP binds 200 UDP sockets a second, each of which lives for 5 ms.
func (g *guest) bindUDP(lasts time.Duration) {
	const life = 5 * time.Millisecond
	inside(g.space, func() {
		begin := time.Now()
		for n := 0; time.Since(begin) < lasts; n++ {
			time.Sleep(time.Until(begin.Add(time.Duration(n) * life)))
			fd := must(unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0))
			check(unix.Bind(fd, &unix.SockaddrInet4{Port: 40_000 + n%10_000}))
			time.Sleep(life)
			check(unix.Close(fd))
		}
	})
}

// One listener is there so that there is something to wait for.
var startSizes = []int{1, 10_000}

func startPart() part {
	return part{"start", "start", []measure{
		{name: startTime, title: "start of the program → all ports at the other end of the link", unit: "sec", modes: ownModes[:2], sizes: startSizes, sizeUnit: "ports"},
	}, func(ctx context.Context, b *bench) {
		// The first poll comes at once, whatever the interval.
		b.turns(b.sizes(startSizes), b.of(12, 6, 1), modes[:2], func(m mode, n int) { b.startup(ctx, m, n) })
	}}
}

// startup starts an agent in a guest that has n ports.
func (b *bench) startup(ctx context.Context, m mode, n int) {
	g := b.newGuest(m, b.space())
	defer g.close()
	g.fill(n)
	began := time.Now()
	g.start()
	g.peer = must(retry(ctx, time.Millisecond, func() (*peer, error) { return newPeer(ctx, g.link) }))
	took := g.peer.settle(ctx, n).Sub(began)
	b.add(startTime, m.name, n, seconds(took), values{"CPU-sec": g.agent.used().CPU.Seconds()})
	g.ready(ctx)
	g.check(ctx)
}

func binaryPart() part {
	return part{"binary", "start", []measure{{name: binarySize, title: "size of the binary, stripped", unit: "B", modes: []string{"fairlead"}}}, func(ctx context.Context, b *bench) {
		if isEarlier() {
			b.add(binarySize, "fairlead", 0, values{"B": float64(must(os.Stat(b.program)).Size())})
			return
		}
		path := filepath.Join(b.tempDir(), "fairlead")
		build := exec.CommandContext(ctx, "go", "build", "-tags", "grpcnotrace", "-trimpath", "-ldflags", "-s -w", "-o", path, "./cmd/fairlead")
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := build.CombinedOutput(); err != nil {
			check(fmt.Errorf("build: %w: %s", err, out))
		}
		b.add(binarySize, "fairlead", 0, values{"B": float64(must(os.Stat(path)).Size())})
	}}
}
