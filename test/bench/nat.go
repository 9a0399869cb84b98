// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/test/bench/report"
	"github.com/fairlead/fairlead/test/kit/netns"
)

// natSizes are how many DNAT rules stand in the table while one is added.
var natSizes = []int{10, 1000, 10_000}

// natMeasure begins when the commit is sent: the kernel tells of it before it returns.
const (
	natMeasure = "NAT commit is sent → message on the link"
	natCPU     = "CPU time for each NAT commit, one in 3 s"
)

func natPart() Part {
	return Part{
		Section: report.Section{
			Name: "nat", Title: "How soon a NAT rule is there",
			About: `A rule that redirects a port is added to a table of others, and told on the link.
fairlead's polling mode does not poll NAT rules, so it is compared with two pollers that the benchmark
brings: one that reads the kernel's dump of all rules each second, as cheaply as that can be
done and publishing nothing, and one that runs iptables-save each three seconds, as guest agents do. All run side by
side. The CPU time is what one change costs with one change in three seconds: what a poller spends
between changes counts.`,
			Figures: []report.Figure{
				{File: "nat-latency", Title: "NAT commit to message, median", Measure: natMeasure, Kind: report.Lines, X: "rules in the table", Y: "time", LogX: true, LogY: true},
				{File: "nat-cpu", Title: "CPU for each NAT commit", Measure: natCPU, Kind: report.Lines, X: "rules in the table", Y: "CPU", LogX: true, LogY: true},
			},
		},
		Run: measureNAT,
	}
}

// natMode is one way to see NAT rules.
type natMode struct {
	name string
	make func(ctx context.Context, binary, dir string, n int) (natWatcher, error)
	many int // samples for each of a poller's
}

// natWatcher is a way to see rules at work in a namespace of its own.
type natWatcher interface {
	// commit adds a rule for a port, and says when it began.
	commit(p uint16) (began time.Time, err error)
	// seen returns where the time comes when the port is told.
	seen(p uint16) <-chan time.Time
	cpu() (time.Duration, error)
	// check returns by what it sees rules, and an error unless that really ran.
	check(ctx context.Context) (by string, err error)
	// spacing is the time between changes at which they are met at any phase.
	spacing() time.Duration
	close()
}

// natPace is how often a change is made while CPU time is measured.
const natPace = 3 * time.Second

// The pollers of NAT rules.
const (
	modeDump1 = "dump 1 s"
	modeSave3 = "iptables-save 3 s"
)

var natModes = []natMode{
	{modeBPF, newNATAgent, 30},
	{modeDump1, func(ctx context.Context, _, _ string, n int) (natWatcher, error) {
		return newNATPoller(ctx, n, time.Second, false, dumpPorts)
	}, 1},
	{modeSave3, func(ctx context.Context, _, _ string, n int) (natWatcher, error) {
		return newNATPoller(ctx, n, 3*time.Second, true, savedPorts)
	}, 1},
}

// measureNAT measures all modes side by side, at each size.
func measureNAT(ctx context.Context, e *Env) error {
	for _, n := range natSizes {
		if e.Scale == Tiny && n > natSizes[0] {
			break
		}
		if err := measureNATSize(ctx, e, n); err != nil {
			return fmt.Errorf("%d rules: %w", n, err)
		}
	}
	return nil
}

func measureNATSize(ctx context.Context, e *Env, n int) error {
	samples, used, by := make([][]float64, len(natModes)), make([]float64, len(natModes)), make([]string, len(natModes))
	errs := make([]error, len(natModes))
	watchers := make([]natWatcher, len(natModes))
	defer func() {
		for _, w := range watchers {
			if w != nil {
				w.close()
			}
		}
	}()
	for i, m := range natModes {
		dir, err := e.Dir()
		if err != nil {
			return err
		}
		w, err := m.make(ctx, e.Program, dir, n)
		if errs[i] = err; err == nil {
			watchers[i] = w
		}
	}
	e.Progress("%d rules", n)
	rounds := e.Of(8, 4, 2)
	var wg sync.WaitGroup
	for i, m := range natModes {
		if errs[i] != nil {
			continue
		}
		wg.Go(func() {
			if samples[i], used[i], errs[i] = sampleNAT(ctx, watchers[i], rounds, m.many); errs[i] == nil {
				by[i], errs[i] = watchers[i].check(ctx)
			}
		})
	}
	wg.Wait()
	for i, m := range natModes {
		latency := report.Cell{Measure: natMeasure, Mode: m.name, Size: float64(n), SizeUnit: "rules", Unit: "s", By: by[i]}
		cpu := latency
		cpu.Measure = natCPU
		if errs[i] != nil {
			e.Fail(latency, errs[i])
			e.Fail(cpu, errs[i])
			continue
		}
		e.Samples(latency, samples[i])
		e.Value(cpu, used[i])
	}
	return ctx.Err()
}

// sampleNAT makes a change each natPace, for the CPU time, and then, where the
// watcher hears events, many times as many.
func sampleNAT(ctx context.Context, w natWatcher, rounds, many int) (samples []float64, cpu float64, err error) {
	next := uint16(1)
	one := func() error {
		p := next
		next++
		said := w.seen(p)
		began, err := w.commit(p)
		if err != nil {
			return err
		}
		select {
		case at := <-said:
			samples = append(samples, at.Sub(began).Seconds())
			return nil
		case <-time.After(limit):
			return fmt.Errorf("port %d was not seen within %v", p, limit)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	before, err := w.cpu()
	if err != nil {
		return nil, 0, err
	}
	began := time.Now()
	for i := range rounds {
		time.Sleep(time.Until(began.Add(time.Duration(i) * natPace).Add(rand.N(natPace / 2))))
		if err := one(); err != nil {
			return nil, 0, err
		}
	}
	time.Sleep(time.Until(began.Add(time.Duration(rounds) * natPace)))
	after, err := w.cpu()
	if err != nil {
		return nil, 0, err
	}
	for range rounds * (many - 1) {
		time.Sleep(w.spacing() + rand.N(20*time.Millisecond))
		if err := one(); err != nil {
			return nil, 0, err
		}
	}
	return samples, (after - before).Seconds() / float64(rounds), nil
}

// natTable is a table of n DNAT rules in a namespace, and a way to add more.
type natTable struct {
	space *netns.Space
	conn  *nftables.Conn
	table *nftables.Table
	chain *nftables.Chain
}

// fillNAT makes the table in the form that iptables-save reads.
func fillNAT(s *netns.Space, n int) (*natTable, error) {
	var b strings.Builder
	b.WriteString("*nat\n:PREROUTING ACCEPT [0:0]\n")
	for i := range n {
		fmt.Fprintf(&b, "-A PREROUTING -p tcp -m tcp --dport %d -j DNAT --to-destination 10.1.%d.%d:80\n", 20000+i, i/250, i%250+1)
	}
	b.WriteString("COMMIT\n")
	cmd := exec.Command("iptables-nft-restore")
	cmd.Stdin, cmd.Stderr = strings.NewReader(b.String()), os.Stderr
	if err := s.Start(cmd); err != nil {
		return nil, err
	}
	if err := cmd.Wait(); err != nil {
		return nil, fmt.Errorf("iptables-nft-restore: %w", err)
	}
	conn, err := nftables.New(nftables.WithNetNSFd(s.FD()), nftables.AsLasting())
	if err != nil {
		return nil, err
	}
	table := &nftables.Table{Name: "nat", Family: nftables.TableFamilyIPv4}
	return &natTable{s, conn, table, &nftables.Chain{Name: "PREROUTING", Table: table}}, nil
}

func (t *natTable) commit(p uint16) (time.Time, error) {
	t.conn.AddRule(&nftables.Rule{Table: t.table, Chain: t.chain, Exprs: []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{unix.IPPROTO_TCP}},
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: binaryutil.BigEndian.PutUint16(p)},
		&expr.Immediate{Register: 1, Data: []byte{10, 3, 0, 1}},
		&expr.NAT{Type: expr.NATTypeDestNAT, Family: unix.NFPROTO_IPV4, RegAddrMin: 1},
	}})
	began := time.Now()
	return began, t.conn.Flush()
}

// natAgent is an agent whose link the bench holds.
type natAgent struct {
	*natTable
	guest *guest
	peer  *peer
}

func newNATAgent(ctx context.Context, program, dir string, n int) (_ natWatcher, err error) {
	a := &natAgent{}
	defer func() {
		if err != nil {
			a.close()
		}
	}()
	if a.guest, err = newGuest(program, dir, modes[0]); err != nil {
		return nil, err
	}
	if a.natTable, err = fillNAT(a.guest.space, n); err != nil {
		return nil, err
	}
	if _, err = a.guest.ready(ctx); err != nil {
		return nil, err
	}
	if a.peer, err = newPeer(ctx, a.guest); err != nil {
		return nil, err
	}
	// All rules are told before the first sample.
	if err := eventually(ctx, func() error {
		if has, _ := a.peer.standing(); has < n {
			return fmt.Errorf("the agent published %d of %d rules", has, n)
		}
		return nil
	}); err != nil {
		return nil, err
	}
	return a, pause(ctx, 2*time.Second) // what the start left to do is no part of this
}

func (a *natAgent) seen(p uint16) <-chan time.Time {
	return a.peer.expect(port.Key{Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: p})
}

func (a *natAgent) cpu() (time.Duration, error) { return processCPU(a.guest.agent.Process.Pid) }

// check returns the mechanism that tells of rules, which must not be a poll.
func (a *natAgent) check(ctx context.Context) (string, error) {
	if err := a.guest.check(ctx); err != nil {
		return "", err
	}
	l, err := a.guest.list(ctx)
	if err != nil {
		return "", err
	}
	for _, s := range l.Sources {
		if s.Name != "nat" {
			continue
		}
		if s.State != "live" || strings.Contains(s.Method, "generation poll") {
			return "", fmt.Errorf("the NAT source is %s by %q", s.State, s.Method)
		}
		return s.Method, nil
	}
	return "", errors.New("the agent has no NAT source")
}

func (a *natAgent) spacing() time.Duration { return 20 * time.Millisecond }

func (a *natAgent) close() {
	if a.natTable != nil {
		_ = a.conn.CloseLasting()
	}
	if a.peer != nil {
		a.peer.close()
	}
	if a.guest != nil {
		a.guest.close()
	}
}

// processCPU is what a process used, by its clock (CPUCLOCK_SCHED of clock_gettime).
func processCPU(pid int) (time.Duration, error) {
	var t unix.Timespec
	if err := unix.ClockGettime(int32(^pid<<3|2), &t); err != nil {
		return 0, fmt.Errorf("clock of process %d: %w", pid, err)
	}
	return time.Duration(t.Nano()), nil
}

// natPoller reads the whole table each interval.
type natPoller struct {
	*natTable
	every time.Duration
	tool  bool // rules are added and read by iptables
	stop  context.CancelFunc
	done  chan struct{}

	mu   sync.Mutex
	used time.Duration
	want map[uint16]chan time.Time
	err  error
}

// reader returns the ports below 20000 that rules match now, and what reading took.
type reader func(s *netns.Space) (ports []uint16, used time.Duration, err error)

func newNATPoller(ctx context.Context, n int, every time.Duration, tool bool, read reader) (natWatcher, error) {
	s, err := netns.New()
	if err != nil {
		return nil, err
	}
	t, err := fillNAT(s, n)
	if err != nil {
		return nil, errors.Join(err, s.Close())
	}
	ctx, stop := context.WithCancel(ctx)
	p := &natPoller{natTable: t, every: every, tool: tool, stop: stop, done: make(chan struct{}), want: map[uint16]chan time.Time{}}
	go p.poll(ctx, read)
	return p, nil
}

func (p *natPoller) poll(ctx context.Context, read reader) {
	defer close(p.done)
	tick := time.NewTicker(p.every)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		ports, used, err := read(p.space)
		now := time.Now()
		p.mu.Lock()
		p.used += used
		p.err = errors.Join(p.err, err)
		for _, port := range ports {
			if c, ok := p.want[port]; ok {
				delete(p.want, port)
				c <- now
			}
		}
		p.mu.Unlock()
	}
}

// commit adds a rule that iptables-save can read, if that is what polls.
func (p *natPoller) commit(port uint16) (time.Time, error) {
	if !p.tool {
		return p.natTable.commit(port)
	}
	cmd := exec.Command("iptables-nft", "-t", "nat", "-A", "PREROUTING", "-p", "tcp", "--dport", strconv.Itoa(int(port)),
		"-j", "DNAT", "--to-destination", "10.3.0.1")
	cmd.Stderr = os.Stderr
	began := time.Now()
	err := p.space.Start(cmd)
	if err == nil {
		err = cmd.Wait()
	}
	return began, err
}

func (p *natPoller) seen(port uint16) <-chan time.Time {
	c := make(chan time.Time, 1)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.want[port] = c
	return c
}

func (p *natPoller) cpu() (time.Duration, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.used, p.err
}

func (p *natPoller) check(context.Context) (string, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return "poll", p.err
}

func (p *natPoller) spacing() time.Duration { return p.every }

func (p *natPoller) close() {
	p.stop()
	<-p.done
	_ = p.conn.CloseLasting()
	_ = p.space.Close()
}

// dumpPorts reads the rules as the kernel dumps them, as cheaply as that can be done.
func dumpPorts(s *netns.Space) (ports []uint16, used time.Duration, err error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var before, after unix.Rusage
	_ = unix.Getrusage(unix.RUSAGE_THREAD, &before)
	c, err := netlink.Dial(unix.NETLINK_NETFILTER, &netlink.Config{NetNS: s.FD(), MessageBufferSize: 256 << 10})
	if err != nil {
		return nil, 0, err
	}
	defer func() { err = errors.Join(err, c.Close()) }()
	_, err = c.Send(netlink.Message{
		Header: netlink.Header{Type: unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_GETRULE, Flags: netlink.Request | netlink.Dump},
		Data:   []byte{unix.NFPROTO_IPV4, 0, 0, 0},
	})
	if err != nil {
		return nil, 0, err
	}
	for m, err := range c.ReceiveIter() {
		if err != nil {
			return nil, 0, err
		}
		if p, ok := comparedPort(m.Data); ok && p < 20000 {
			ports = append(ports, p)
		}
	}
	_ = unix.Getrusage(unix.RUSAGE_THREAD, &after)
	return ports, rusage(&after) - rusage(&before), nil
}

func rusage(r *unix.Rusage) time.Duration {
	return time.Duration(unix.TimevalToNsec(r.Utime) + unix.TimevalToNsec(r.Stime))
}

// comparedPort finds a comparison with two bytes in a rule: an attribute of type
// 1 (NFTA_DATA_VALUE) and length 6.
func comparedPort(b []byte) (uint16, bool) {
	for i := 0; i+6 <= len(b); i += 4 {
		if binary.NativeEndian.Uint16(b[i:]) == 6 && binary.NativeEndian.Uint16(b[i+2:]) == 1 {
			return binary.BigEndian.Uint16(b[i+4:]), true
		}
	}
	return 0, false
}

// savedPorts reads the rules as the incumbent does: by the tool and its text.
func savedPorts(s *netns.Space) (ports []uint16, used time.Duration, err error) {
	cmd := exec.Command("iptables-nft-save", "-t", "nat")
	var out, said strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &said
	if err := s.Start(cmd); err != nil {
		return nil, 0, err
	}
	if err := cmd.Wait(); err != nil {
		return nil, 0, fmt.Errorf("iptables-nft-save: %w: %s", err, said.String())
	}
	for line := range strings.Lines(out.String()) {
		_, rest, ok := strings.Cut(line, "--dport ")
		if !ok {
			continue
		}
		word, _, _ := strings.Cut(rest, " ")
		if p, err := strconv.ParseUint(word, 10, 16); err == nil && p < 20000 {
			ports = append(ports, uint16(p))
		}
	}
	state := cmd.ProcessState
	return ports, state.UserTime() + state.SystemTime(), nil
}
