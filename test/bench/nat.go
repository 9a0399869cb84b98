// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os/exec"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/schedule"
	"github.com/fairlead/fairlead/internal/status"
	"github.com/fairlead/fairlead/test/kit/netns"
)

// The clock starts before the commit, because the kernel notifies before it returns.
const (
	natMessage = "NAT commit is sent → message on the link"
	natCPU     = "CPU time for each NAT commit, one in 3 s"
)

const modeDump1, modeSave3 = "dump 1 s", "iptables-save 3 s"

var natModes = []string{modeBPF, modeDump1, modeSave3}

// natSizes are numbers of DNAT rules in the table.
var natSizes = []int{10, 1000, 10_000}

func natPart() part {
	return part{"nat", "nat", []measure{
		{name: natMessage, unit: "s", modes: natModes, sizes: natSizes, sizeUnit: "rules", figure: figure{"nat-latency", lines}},
		{name: natCPU, unit: "s", modes: natModes, sizes: natSizes, sizeUnit: "rules", figure: figure{"nat-cpu", lines}},
	}, func(ctx context.Context, b *bench) error {
		for _, n := range b.sizes(natSizes) {
			if err := b.nat(ctx, n); err != nil {
				return fmt.Errorf("%d rules: %w", n, err)
			}
		}
		return nil
	}}
}

// natWatcher sees NAT rules in a namespace of its own.
type natWatcher interface {
	// commit adds a rule for a port, and returns when it began.
	commit(p uint16) (began time.Time, err error)
	// expect returns a function that waits until the port is seen.
	expect(p uint16) func(context.Context) (time.Time, error)
	cpu() (time.Duration, error)
	// check returns an error unless it worked as its name says.
	check(ctx context.Context) error
}

// nat measures all modes side by side.
func (b *bench) nat(ctx context.Context, n int) error {
	agent, err := newNATAgent(ctx, b, n)
	if err != nil {
		return err
	}
	dump, err := newNATPoller(ctx, b, n, time.Second, dumpPorts)
	if err != nil {
		return err
	}
	save, err := newNATPoller(ctx, b, n, 3*time.Second, savedPorts)
	if err != nil {
		return err
	}
	save.tool = true
	group, ctx := errgroup.WithContext(ctx)
	for mode, w := range map[string]natWatcher{modeBPF: agent, modeDump1: dump, modeSave3: save} {
		group.Go(func() error {
			if err := errors.Join(b.sampleNAT(ctx, w, mode, n), w.check(ctx)); err != nil {
				return fmt.Errorf("%s: %w", mode, err)
			}
			return nil
		})
	}
	return group.Wait()
}

// sampleNAT makes a change every 3 s, for the CPU time, and then many more for the
// mode that need not wait for its next poll.
func (b *bench) sampleNAT(ctx context.Context, w natWatcher, mode string, n int) error {
	const pace = 3 * time.Second
	before, err := w.cpu()
	if err != nil {
		return err
	}
	rounds, more := b.of(8, 4, 2), 0
	if mode == modeBPF {
		more = b.of(240, 120, 10)
	}
	began := time.Now()
	for i := range rounds + more {
		pause := 20*time.Millisecond + rand.N(20*time.Millisecond)
		if i < rounds {
			pause = time.Until(began.Add(time.Duration(i) * pace).Add(rand.N(pace / 2)))
		}
		if err := schedule.Sleep(ctx, pause); err != nil {
			return err
		}
		if err := b.oneNAT(ctx, w, natMessage, mode, n, uint16(1+i)); err != nil {
			return err
		}
		if i != rounds-1 {
			continue
		}
		time.Sleep(time.Until(began.Add(time.Duration(rounds) * pace)))
		after, err := w.cpu()
		if err != nil {
			return err
		}
		b.add(natCPU, mode, n, (after-before).Seconds()/float64(rounds))
	}
	return nil
}

func (b *bench) oneNAT(ctx context.Context, w natWatcher, measure, mode string, n int, port uint16) error {
	wait := w.expect(port)
	began, err := w.commit(port)
	if err != nil {
		return err
	}
	at, err := wait(ctx)
	if err != nil {
		return err
	}
	b.add(measure, mode, n, at.Sub(began).Seconds())
	return nil
}

// natTable is a table of DNAT rules, and a way to add more.
type natTable struct {
	space *netns.Space
	mu    sync.Mutex // of conn
	conn  *nftables.Conn
	chain *nftables.Chain
}

// fillNAT makes a table of n rules, in the form that iptables-save can read.
func fillNAT(s *netns.Space, n int) (*natTable, error) {
	var b strings.Builder
	b.WriteString("*nat\n:PREROUTING ACCEPT [0:0]\n")
	for i := range n {
		fmt.Fprintf(&b, "-A PREROUTING -p tcp -m tcp --dport %d -j DNAT --to-destination 10.1.%d.%d:80\n", 20_000+i, i/250, i%250+1)
	}
	b.WriteString("COMMIT\n")
	cmd := exec.Command("iptables-nft-restore")
	cmd.Stdin = strings.NewReader(b.String())
	if err := runIn(s, cmd); err != nil {
		return nil, err
	}
	conn, err := nftables.New(nftables.WithNetNSFd(s.FD()), nftables.AsLasting())
	table := &nftables.Table{Name: "nat", Family: nftables.TableFamilyIPv4}
	return &natTable{space: s, conn: conn, chain: &nftables.Chain{Name: "PREROUTING", Table: table}}, err
}

// runIn runs a command in a namespace to its end.
func runIn(s *netns.Space, cmd *exec.Cmd) error {
	var said strings.Builder
	cmd.Stderr = &said
	err := s.Start(cmd)
	if err == nil {
		err = cmd.Wait()
	}
	if err != nil {
		return fmt.Errorf("%s: %w: %s", cmd, err, said.String())
	}
	return nil
}

func (t *natTable) close() { _ = t.conn.CloseLasting() }

func (t *natTable) commit(p uint16) (time.Time, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.conn.AddRule(&nftables.Rule{Table: t.chain.Table, Chain: t.chain, Exprs: []expr.Any{
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

// natAgent is a guest with NAT rules.
type natAgent struct {
	*natTable
	*guest
}

func newNATAgent(ctx context.Context, b *bench, n int) (a natAgent, err error) {
	if a.guest, err = b.newGuest(modes[0], nil); err != nil {
		return a, err
	}
	if a.natTable, err = fillNAT(a.guest.space, n); err != nil {
		return a, err
	}
	b.cleanup(a.natTable.close)
	if err := a.guest.start(); err != nil {
		return a, err
	}
	if err := a.connect(ctx); err != nil {
		return a, err
	}
	if _, err := a.peer.settle(ctx, n); err != nil {
		return a, err
	}
	return a, schedule.Sleep(ctx, 2*time.Second) // what the start left to do
}

func (a natAgent) expect(p uint16) func(context.Context) (time.Time, error) {
	return a.peer.expect(natKey(p), "")
}

func (a natAgent) cpu() (time.Duration, error) {
	u, err := a.used()
	return u.CPU, err
}

// check also returns an error if the agent polls for rules.
func (a natAgent) check(ctx context.Context) error {
	if err := a.guest.check(ctx); err != nil {
		return err
	}
	l, err := status.NewClient(a.control).List(ctx)
	if err != nil {
		return err
	}
	method := methodOf(l, "nat")
	if method == "" || strings.Contains(method, "generation poll") {
		return fmt.Errorf("the agent sees NAT rules by %q", method)
	}
	a.b.method(a.mode.name, method)
	return nil
}

// natPoller reads the whole table in intervals.
type natPoller struct {
	*natTable
	tool bool // rules are added by iptables

	seen sync.Mutex // of what follows
	used time.Duration
	want map[uint16]chan time.Time
	err  error
}

// reader returns the ports below 20000 that have rules, and the CPU time that it took.
type reader func(s *netns.Space) (ports []uint16, used time.Duration, err error)

func newNATPoller(ctx context.Context, b *bench, n int, every time.Duration, read reader) (*natPoller, error) {
	s, err := netns.New()
	if err != nil {
		return nil, err
	}
	b.cleanup(func() { _ = s.Close() })
	t, err := fillNAT(s, n)
	if err != nil {
		return nil, err
	}
	p := &natPoller{natTable: t, want: map[uint16]chan time.Time{}}
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	b.cleanup(func() {
		cancel()
		<-done
		t.close()
	})
	go func() {
		defer close(done)
		for next := time.Now().Add(every); schedule.Sleep(ctx, time.Until(next)) == nil; next = next.Add(every) {
			ports, used, err := read(s)
			p.receive(ports, used, err)
		}
	}()
	return p, nil
}

func (p *natPoller) receive(ports []uint16, used time.Duration, err error) {
	now := time.Now()
	p.seen.Lock()
	defer p.seen.Unlock()
	p.used += used
	p.err = errors.Join(p.err, err)
	for _, port := range ports {
		if c, ok := p.want[port]; ok {
			delete(p.want, port)
			c <- now
		}
	}
}

func (p *natPoller) commit(port uint16) (time.Time, error) {
	if !p.tool {
		return p.natTable.commit(port)
	}
	began := time.Now()
	return began, runIn(p.space, exec.Command("iptables-nft", "-t", "nat", "-A", "PREROUTING", "-p", "tcp", "--dport", strconv.Itoa(int(port)),
		"-j", "DNAT", "--to-destination", "10.3.0.1"))
}

func (p *natPoller) expect(port uint16) func(context.Context) (time.Time, error) {
	c := make(chan time.Time, 1)
	p.seen.Lock()
	defer p.seen.Unlock()
	p.want[port] = c
	return func(ctx context.Context) (time.Time, error) {
		select {
		case at := <-c:
			return at, nil
		case <-time.After(limit):
			return time.Time{}, fmt.Errorf("port %d was not seen within %v", port, limit)
		case <-ctx.Done():
			return time.Time{}, ctx.Err()
		}
	}
}

func (p *natPoller) cpu() (time.Duration, error) {
	p.seen.Lock()
	defer p.seen.Unlock()
	return p.used, p.err
}

func (p *natPoller) check(context.Context) error {
	_, err := p.cpu()
	return err
}

// dumpPorts dumps the rules from the kernel, at the lowest possible cost.
func dumpPorts(s *netns.Space) (ports []uint16, used time.Duration, err error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	began := threadTime()
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
		if p, ok := comparedPort(m.Data); ok && p < 20_000 {
			ports = append(ports, p)
		}
	}
	return ports, threadTime() - began, nil
}

// comparedPort finds a comparison with two bytes in a rule: an attribute of type 1
// (NFTA_DATA_VALUE) and length 6.
func comparedPort(b []byte) (uint16, bool) {
	for i := 0; i+6 <= len(b); i += 4 {
		if binary.NativeEndian.Uint16(b[i:]) == 6 && binary.NativeEndian.Uint16(b[i+2:]) == 1 {
			return binary.BigEndian.Uint16(b[i+4:]), true
		}
	}
	return 0, false
}

var dport = regexp.MustCompile(`--dport (\d+)`)

// savedPorts reads the rules with iptables-save.
func savedPorts(s *netns.Space) (ports []uint16, used time.Duration, err error) {
	cmd := exec.Command("iptables-nft-save", "-t", "nat")
	var out strings.Builder
	cmd.Stdout = &out
	if err := runIn(s, cmd); err != nil {
		return nil, 0, err
	}
	for _, m := range dport.FindAllStringSubmatch(out.String(), -1) {
		if p, err := strconv.Atoi(m[1]); err == nil && p < 20_000 {
			ports = append(ports, uint16(p))
		}
	}
	return ports, cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime(), nil
}
