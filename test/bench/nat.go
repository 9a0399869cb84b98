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
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/schedule"
	"github.com/fairlead/fairlead/internal/status"
	"github.com/fairlead/fairlead/test/kit/netns"
)

// The clock starts before the commit, because the kernel notifies before it returns.
const natMessage = "NAT commit is sent → message on the link"

const modeDump1, modeSave3 = "dump 1 s", "iptables-save 3 s"

var natModes = []string{modeBPF, modeDump1, modeSave3}

// natSizes are numbers of DNAT rules in the table.
var natSizes = []int{10, 1000, 10_000}

func natPart() part {
	return part{"nat", "nat", []measure{
		{name: natMessage, unit: "s", modes: natModes, sizes: natSizes, sizeUnit: "rules", figure: "nat-latency"},
	}, func(ctx context.Context, b *bench) {
		for _, n := range b.sizes(natSizes) {
			b.nat(ctx, n)
		}
	}}
}

// natWatcher sees NAT rules in a namespace of its own.
type natWatcher interface {
	// commit adds a rule for a port, and returns when it began.
	commit(p uint16) (began time.Time)
	// expect waits until the port is seen.
	expect(p uint16) wait
	// verify fails unless it worked as its name says.
	verify(ctx context.Context)
}

// nat measures all modes side by side.
func (b *bench) nat(ctx context.Context, n int) {
	watchers := map[string]natWatcher{
		modeBPF:   newNATAgent(ctx, b, n),
		modeDump1: newNATPoller(ctx, b, n, time.Second, dumpPorts, false),
		modeSave3: newNATPoller(ctx, b, n, 3*time.Second, savedPorts, true),
	}
	together(ctx, natModes, func(ctx context.Context, mode string) {
		b.sampleNAT(ctx, watchers[mode], mode, n)
		watchers[mode].verify(ctx)
	})
}

// sampleNAT makes a change at a random moment now and then for a poller, and many more
// for the mode that need not wait for its next poll.
func (b *bench) sampleNAT(ctx context.Context, w natWatcher, mode string, n int) {
	rounds, pause := b.of(8, 4, 1), 3*time.Second
	if mode == modeBPF {
		rounds, pause = b.of(240, 120, 10), 40*time.Millisecond
	}
	for i := range rounds {
		check(schedule.Sleep(ctx, rand.N(pause)))
		b.oneNAT(ctx, w, natMessage, mode, n, uint16(1+i))
	}
}

func (b *bench) oneNAT(ctx context.Context, w natWatcher, measure, mode string, n int, port uint16) {
	seen := w.expect(port)
	began := w.commit(port)
	b.add(measure, mode, n, seen(ctx).Sub(began).Seconds())
}

// natTable is a table of DNAT rules, and a way to add more.
type natTable struct {
	space *netns.Space
	mu    sync.Mutex // of conn
	conn  *nftables.Conn
	chain *nftables.Chain
}

// fillNAT makes a table of n rules, in the form that iptables-save can read.
func fillNAT(b *bench, s *netns.Space, n int) *natTable {
	var rules strings.Builder
	rules.WriteString("*nat\n:PREROUTING ACCEPT [0:0]\n")
	for i := range n {
		fmt.Fprintf(&rules, "-A PREROUTING -p tcp -m tcp --dport %d -j DNAT --to-destination 10.1.%d.%d:80\n", 21_000+i, i/250, i%250+1)
	}
	rules.WriteString("COMMIT\n")
	cmd := exec.Command("iptables-nft-restore")
	cmd.Stdin = strings.NewReader(rules.String())
	check(runIn(s, cmd))
	conn := must(nftables.New(nftables.WithNetNSFd(s.FD()), nftables.AsLasting()))
	b.cleanup(func() { _ = conn.CloseLasting() })
	table := &nftables.Table{Name: "nat", Family: nftables.TableFamilyIPv4}
	return &natTable{space: s, conn: conn, chain: &nftables.Chain{Name: "PREROUTING", Table: table}}
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

func (t *natTable) commit(p uint16) time.Time {
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
	check(t.conn.Flush())
	return began
}

// natAgent is a guest with NAT rules.
type natAgent struct {
	*natTable
	*guest
}

func newNATAgent(ctx context.Context, b *bench, n int) natAgent {
	g := b.newGuest(modes[0], nil)
	a := natAgent{fillNAT(b, g.space, n), g}
	g.start()
	g.connect(ctx)
	g.peer.settle(ctx, n)
	check(schedule.Sleep(ctx, 2*time.Second)) // what the start left to do
	return a
}

func (a natAgent) expect(p uint16) wait { return a.peer.expect(natKey(p), "") }

// verify also fails if the agent polls for rules.
func (a natAgent) verify(ctx context.Context) {
	a.check(ctx)
	method := methodOf(must(status.NewClient(a.control).List(ctx)), "nat")
	if method == "" || strings.Contains(method, "generation poll") {
		check(fmt.Errorf("the agent sees NAT rules by %q", method))
	}
	a.b.method(a.mode.name, method)
}

// natPoller reads the whole table in intervals.
type natPoller struct {
	*natTable
	tool bool // rules are added by iptables

	seen sync.Mutex // of what follows
	want map[uint16]chan time.Time
	err  error
}

// reader returns the ports below 20000 that have rules.
type reader func(s *netns.Space) []uint16

func newNATPoller(ctx context.Context, b *bench, n int, every time.Duration, read reader, tool bool) *natPoller {
	s := must(netns.New())
	b.cleanup(func() { _ = s.Close() })
	p := &natPoller{natTable: fillNAT(b, s, n), tool: tool, want: map[uint16]chan time.Time{}}
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	b.cleanup(func() {
		cancel()
		<-done
	})
	go func() {
		defer close(done)
		for next := time.Now().Add(every); schedule.Sleep(ctx, time.Until(next)) == nil; next = next.Add(every) {
			var ports []uint16
			err := attempt(func() { ports = read(s) })
			p.receive(ports, err)
		}
	}()
	return p
}

func (p *natPoller) receive(ports []uint16, err error) {
	now := time.Now()
	p.seen.Lock()
	defer p.seen.Unlock()
	p.err = errors.Join(p.err, err)
	for _, port := range ports {
		if c, ok := p.want[port]; ok {
			delete(p.want, port)
			c <- now
		}
	}
}

func (p *natPoller) commit(port uint16) time.Time {
	if !p.tool {
		return p.natTable.commit(port)
	}
	began := time.Now()
	check(runIn(p.space, exec.Command("iptables-nft", "-t", "nat", "-A", "PREROUTING", "-p", "tcp", "--dport", strconv.Itoa(int(port)),
		"-j", "DNAT", "--to-destination", "10.3.0.1")))
	return began
}

func (p *natPoller) expect(port uint16) wait {
	c := make(chan time.Time, 1)
	p.seen.Lock()
	defer p.seen.Unlock()
	p.want[port] = c
	return arrival(c, nil, nil, fmt.Sprintf("port %d", port))
}

func (p *natPoller) verify(context.Context) {
	p.seen.Lock()
	defer p.seen.Unlock()
	check(p.err)
}

// dumpPorts dumps the rules from the kernel, at the lowest possible cost.
func dumpPorts(s *netns.Space) (ports []uint16) {
	c := must(netlink.Dial(unix.NETLINK_NETFILTER, &netlink.Config{NetNS: s.FD(), MessageBufferSize: 256 << 10}))
	defer func() { _ = c.Close() }()
	must(c.Send(netlink.Message{
		Header: netlink.Header{Type: unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_GETRULE, Flags: netlink.Request | netlink.Dump},
		Data:   []byte{unix.NFPROTO_IPV4, 0, 0, 0},
	}))
	for m, err := range c.ReceiveIter() {
		check(err)
		if p, ok := comparedPort(m.Data); ok && p < 20_000 {
			ports = append(ports, p)
		}
	}
	return ports
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

var dport = regexp.MustCompile(`--dport (\d{1,4}) `) // below 10000: those that are added

// savedPorts reads the rules with iptables-save.
func savedPorts(s *netns.Space) (ports []uint16) {
	cmd := exec.Command("iptables-nft-save", "-t", "nat")
	var out strings.Builder
	cmd.Stdout = &out
	check(runIn(s, cmd))
	for _, m := range dport.FindAllStringSubmatch(out.String(), -1) {
		ports = append(ports, uint16(must(strconv.Atoi(m[1]))))
	}
	return ports
}
