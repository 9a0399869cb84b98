// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os/exec"
	"strconv"
	"strings"
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

// natWatcher is one way to see rules that are added to a table of n.
type natWatcher struct {
	mode   string
	rounds int
	commit func(p uint16) // adds a rule for a port
	expect func(ctx context.Context, p uint16) wait
}

// nat measures all modes side by side.
func (b *bench) nat(ctx context.Context, n int) {
	g := b.newGuest(modes[0], b.space())
	watched, dumped, saved := newNATTable(b, g.space, n), newNATTable(b, b.space(), n), newNATTable(b, b.space(), n)
	g.start()
	g.connect(ctx)
	g.peer.settle(ctx, n)
	check(schedule.Sleep(ctx, 2*time.Second)) // what the start left to do
	together(ctx, []natWatcher{
		{modeBPF, b.of(240, 120, 10), watched.commit, func(_ context.Context, p uint16) wait { return g.peer.expect(natKey(p), "") }},
		{modeDump1, b.of(8, 4, 1), dumped.commit, dumped.poll(time.Second, countDumped)},
		{modeSave3, b.of(8, 4, 1), saved.append, saved.poll(3*time.Second, countSaved)},
	}, func(ctx context.Context, w natWatcher) {
		for i := range w.rounds {
			p := uint16(1 + i)
			check(schedule.Sleep(ctx, rand.N(40*time.Millisecond)))
			seen := w.expect(ctx, p)
			began := time.Now()
			w.commit(p)
			b.add(natMessage, w.mode, n, seen(ctx).Sub(began).Seconds())
		}
	})
	g.checkNAT(ctx)
}

// checkNAT fails if the agent polls for rules.
func (g *guest) checkNAT(ctx context.Context) {
	g.check(ctx)
	method := methodOf(must(status.NewClient(g.control).List(ctx)), "nat")
	if method == "" || strings.Contains(method, "generation poll") {
		check(fmt.Errorf("the agent sees NAT rules by %q", method))
	}
	g.b.method(modeBPF, method)
}

// natTable is a table of DNAT rules.
type natTable struct {
	space *netns.Space
	rules int
	conn  *nftables.Conn
	chain *nftables.Chain
}

// newNATTable makes a table of n rules, in the form that iptables-save can read, and an
// interface by which packets can reach them.
func newNATTable(b *bench, s *netns.Space, n int) *natTable {
	for _, args := range []string{
		"link add outside type veth peer name peer", "addr add 10.9.0.2/24 dev outside",
		"link set outside up", "link set peer up",
	} {
		runIn(s, exec.Command("ip", strings.Fields(args)...))
	}
	var rules strings.Builder
	rules.WriteString("*nat\n:PREROUTING ACCEPT [0:0]\n")
	for i := range n {
		fmt.Fprintf(&rules, "-A PREROUTING -p tcp -m tcp --dport %d -j DNAT --to-destination 10.1.%d.%d:80\n", 21_000+i, i/250, i%250+1)
	}
	rules.WriteString("COMMIT\n")
	cmd := exec.Command("iptables-nft-restore")
	cmd.Stdin = strings.NewReader(rules.String())
	runIn(s, cmd)
	conn := must(nftables.New(nftables.WithNetNSFd(s.FD()), nftables.AsLasting()))
	b.cleanup(func() { _ = conn.CloseLasting() })
	table := &nftables.Table{Name: "nat", Family: nftables.TableFamilyIPv4}
	return &natTable{s, n, conn, &nftables.Chain{Name: "PREROUTING", Table: table}}
}

// runIn runs a command in a namespace to its end, and returns its output.
func runIn(s *netns.Space, cmd *exec.Cmd) string {
	var out, problem strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &problem
	check(s.Start(cmd))
	if err := cmd.Wait(); err != nil {
		check(fmt.Errorf("%s: %w: %s", cmd, err, problem.String()))
	}
	return out.String()
}

// commit adds a rule by netlink.
func (t *natTable) commit(p uint16) {
	t.conn.AddRule(&nftables.Rule{Table: t.chain.Table, Chain: t.chain, Exprs: []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{unix.IPPROTO_TCP}},
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: binaryutil.BigEndian.PutUint16(p)},
		&expr.Immediate{Register: 1, Data: []byte{10, 3, 0, 1}},
		&expr.NAT{Type: expr.NATTypeDestNAT, Family: unix.NFPROTO_IPV4, RegAddrMin: 1},
	}})
	check(t.conn.Flush())
}

// append adds a rule that iptables-save can read.
func (t *natTable) append(p uint16) {
	runIn(t.space, exec.Command("iptables-nft", "-t", "nat", "-A", "PREROUTING", "-p", "tcp", "--dport", strconv.Itoa(int(p)),
		"-j", "DNAT", "--to-destination", "10.3.0.1"))
}

// poll returns a function that reads the table in intervals until it has one rule more.
func (t *natTable) poll(every time.Duration, count func(*netns.Space) int) func(context.Context, uint16) wait {
	return func(ctx context.Context, p uint16) wait {
		want := t.rules + int(p)
		return pollEach(ctx, every, func() bool { return count(t.space) >= want })
	}
}

// countDumped dumps the rules from the kernel, at the lowest possible cost.
func countDumped(s *netns.Space) (n int) {
	c := must(netlink.Dial(unix.NETLINK_NETFILTER, &netlink.Config{NetNS: s.FD(), MessageBufferSize: 256 << 10}))
	defer func() { _ = c.Close() }()
	must(c.Send(netlink.Message{
		Header: netlink.Header{Type: unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_GETRULE, Flags: netlink.Request | netlink.Dump},
		Data:   []byte{unix.NFPROTO_IPV4, 0, 0, 0},
	}))
	for _, err := range c.ReceiveIter() {
		check(err)
		n++
	}
	return n
}

// countSaved reads the rules with iptables-save.
func countSaved(s *netns.Space) int {
	return strings.Count(runIn(s, exec.Command("iptables-nft-save", "-t", "nat")), "\n-A ")
}
