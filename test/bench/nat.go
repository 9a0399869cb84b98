// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/status"
	"github.com/fairlead/fairlead/test/netns"
)

// natSizes are how many DNAT rules stand in the table while one is added.
var natSizes = []int{10, 1000, 10_000}

// natResult is how one way to see NAT rules did at one size of the table.
type natResult struct {
	Measure string  `json:"measure"`
	Rules   int     `json:"rules"`
	Mode    string  `json:"mode"`
	Rung    string  `json:"rung"`
	N       int     `json:"n"`
	P50     float64 `json:"p50_us"`
	P90     float64 `json:"p90_us"`
	P99     float64 `json:"p99_us"`
	Max     float64 `json:"max_us"`
	// CPU is the processor time for each change, in µs, with one change in three
	// seconds: what a poller spends between changes counts.
	CPU float64 `json:"cpu_us"`
}

// natMeasure begins when the commit is sent: the kernel tells of it before it returns.
const natMeasure = "NAT commit is sent -> message on the link"

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
	rung() string
	// spacing is the time between changes at which they are met at any phase.
	spacing() time.Duration
	close()
}

// natPace is how often a change is made while CPU time is measured.
const natPace = 3 * time.Second

var natModes = []natMode{
	{"fairlead", newNATAgent, 20},
	{"dump 1s", func(ctx context.Context, _, _ string, n int) (natWatcher, error) {
		return newNATPoller(ctx, n, time.Second, false, dumpPorts)
	}, 1},
	{"iptables-save 3s", func(ctx context.Context, _, _ string, n int) (natWatcher, error) {
		return newNATPoller(ctx, n, 3*time.Second, true, savedPorts)
	}, 1},
}

// measureNAT measures all modes side by side, at each size, with rounds samples
// of each poller and many times that of the events.
func measureNAT(ctx context.Context, program, dir string, rounds int) ([]natResult, error) {
	var out []natResult
	for _, n := range natSizes {
		results, err := measureNATSize(ctx, program, filepath.Join(dir, "nat-"+strconv.Itoa(n)), n, rounds)
		if err != nil {
			return nil, fmt.Errorf("%d rules: %w", n, err)
		}
		out = append(out, results...)
	}
	return out, nil
}

func measureNATSize(ctx context.Context, program, dir string, n, rounds int) ([]natResult, error) {
	results, errs := make([]natResult, len(natModes)), make([]error, len(natModes))
	watchers := make([]natWatcher, len(natModes))
	defer func() {
		for _, w := range watchers {
			if w != nil {
				w.close()
			}
		}
	}()
	for i, m := range natModes {
		w, err := m.make(ctx, program, filepath.Join(dir, strconv.Itoa(i)), n)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", m.name, err)
		}
		watchers[i] = w
	}
	var wg sync.WaitGroup
	for i, m := range natModes {
		wg.Go(func() {
			fmt.Fprintf(os.Stderr, "NAT, %d rules: %s\n", n, m.name)
			results[i], errs[i] = sampleNAT(ctx, watchers[i], rounds, m.many)
			results[i].Measure, results[i].Rules, results[i].Mode = natMeasure, n, m.name
		})
	}
	wg.Wait()
	return results, errors.Join(errs...)
}

// sampleNAT makes a change each natPace, for the CPU time, and then, where the
// watcher hears events, more of them.
func sampleNAT(ctx context.Context, w natWatcher, rounds, many int) (natResult, error) {
	var ds []time.Duration
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
			ds = append(ds, at.Sub(began))
			return nil
		case <-time.After(limit):
			return fmt.Errorf("port %d was not seen within %v", p, limit)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	before, err := w.cpu()
	if err != nil {
		return natResult{}, err
	}
	began := time.Now()
	for i := range rounds {
		time.Sleep(time.Until(began.Add(time.Duration(i) * natPace).Add(rand.N(natPace / 2))))
		if err := one(); err != nil {
			return natResult{}, err
		}
	}
	time.Sleep(time.Until(began.Add(time.Duration(rounds) * natPace)))
	after, err := w.cpu()
	if err != nil {
		return natResult{}, err
	}
	for range rounds * (many - 1) {
		time.Sleep(w.spacing() + rand.N(20*time.Millisecond))
		if err := one(); err != nil {
			return natResult{}, err
		}
	}
	slices.Sort(ds)
	at := func(q float64) float64 {
		return float64(ds[min(len(ds)-1, int(q*float64(len(ds))))].Nanoseconds()) / 1e3
	}
	return natResult{
		Rung: w.rung(), N: len(ds), P50: at(0.5), P90: at(0.9), P99: at(0.99), Max: at(1),
		CPU: float64((after - before).Nanoseconds()) / 1e3 / float64(rounds),
	}, nil
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
	p    *probe
	used string
}

func newNATAgent(ctx context.Context, program, dir string, n int) (natWatcher, error) {
	p := &probe{samples: map[string][]time.Duration{}, seen: map[port.Key]chan time.Time{}, lost: make(chan error, 1)}
	a := &natAgent{p: p}
	var err error
	if p.linked, err = newGuest(program, filepath.Join(dir, "linked"), mode{}); err != nil {
		return nil, err
	}
	if a.natTable, err = fillNAT(p.linked.space, n); err != nil {
		return nil, err
	}
	if _, err = p.linked.ready(ctx); err != nil {
		return nil, err
	}
	if err = p.connect(ctx); err != nil {
		return nil, err
	}
	// All rules are told before the first sample.
	for range 400 {
		l, err := status.NewClient(p.linked.control).List(ctx)
		if err == nil && len(l.Publications) >= n {
			for _, s := range l.Sources {
				if s.Name == "nat" {
					a.used = s.Rung
				}
			}
			time.Sleep(2 * time.Second) // what the start left to do is no part of this
			return a, nil
		}
		time.Sleep(25 * time.Millisecond)
	}
	return nil, errors.New("the agent did not publish the rules within 10 s")
}

func (a *natAgent) seen(p uint16) <-chan time.Time {
	return a.p.expect(port.Key{Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: p})
}

func (a *natAgent) cpu() (time.Duration, error) {
	return processCPU(a.p.linked.procs[0].Process.Pid)
}

func (a *natAgent) rung() string           { return a.used }
func (a *natAgent) spacing() time.Duration { return 20 * time.Millisecond }

func (a *natAgent) close() {
	_ = a.conn.CloseLasting()
	_ = a.p.session.Close()
	a.p.linked.close()
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

func (p *natPoller) rung() string           { return "poll" }
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

func reportNAT(results []natResult) error {
	w := tabwriter.NewWriter(os.Stdout, 0, 4, 2, ' ', tabwriter.AlignRight)
	_, _ = fmt.Fprintf(w, "\n%s\n", natMeasure)
	_, _ = fmt.Fprintln(w, "rules\tmode\tn\tp50\tp90\tp99\tmax\tCPU/change\tp50 : fairlead\tCPU : fairlead\t")
	var base natResult
	for _, r := range results {
		if r.Mode == natModes[0].name {
			base = r
		}
		_, _ = fmt.Fprintf(w, "%d\t%s\t%d\t%s\t%s\t%s\t%s\t%s\t%.0f\t%.1f\t\n", r.Rules, r.Mode, r.N, us(r.P50), us(r.P90), us(r.P99), us(r.Max),
			us(r.CPU), r.P50/base.P50, r.CPU/base.CPU)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	fmt.Printf("\nrung: %s\n", base.Rung)
	return nil
}

func appendNATJSON(path string, results []natResult) error {
	f, err := os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	enc := json.NewEncoder(f)
	for _, r := range results {
		if err := enc.Encode(r); err != nil {
			return errors.Join(err, f.Close())
		}
	}
	return f.Close()
}
