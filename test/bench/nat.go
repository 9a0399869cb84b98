// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"os/exec"
	"strings"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/xt"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/schedule"
	"github.com/fairlead/fairlead/internal/status"
	"github.com/fairlead/fairlead/internal/testkit/netns"
)

// The clock starts before the commit, because the kernel notifies before it returns.
const natMessage = "NATCommit"

const modeDump1, modeSave3 = "dump-1s", "iptables-save-3s"

// natSizes are numbers of DNAT rules in the table.
var natSizes = []int{10, 1000, 10_000}

func natPart() part {
	return part{"nat", "nat", []measure{{
		name: natMessage, title: "NAT commit is sent → message on the link", unit: "sec",
		modes: []string{modeBPF, modeDump1, modeSave3}, sizes: natSizes, sizeUnit: "rules",
	}}, func(ctx context.Context, b *bench) {
		for _, n := range b.sizes(natSizes) {
			b.nat(ctx, n)
		}
	}}
}

// nat adds rules to a table of n. All modes see the same rules.
func (b *bench) nat(ctx context.Context, n int) {
	g := b.newGuest(modes[0], b.space())
	table := newNATTable(b, g.space, n)
	g.start()
	g.connect(ctx)
	g.peer.settle(ctx, n)
	check(schedule.Sleep(ctx, 2*time.Second)) // what the start left to do
	polled := b.of(8, 4, 1)                   // of all rounds, because pollers are slow
	for i := range b.of(240, 120, 10) {
		waits := map[string]wait{modeBPF: g.peer.expect(natKey(uint16(1+i)), "")}
		if i < polled {
			for _, p := range []poller{
				{modeDump1, time.Second, func() bool { return countDumped(g.space) > n+i }},
				{modeSave3, 3 * time.Second, func() bool { return countSaved(g.space) > n+i }},
			} {
				waits[p.mode] = p.wait(ctx)
			}
		}
		check(schedule.Sleep(ctx, rand.N(40*time.Millisecond)))
		began := time.Now()
		table.commit(uint16(1 + i))
		b.seen(ctx, natMessage, n, began, waits)
	}
	g.checkNAT(ctx)
	g.close()
}

// checkNAT fails if the agent polls for rules.
func (g *guest) checkNAT(ctx context.Context) {
	g.check(ctx)
	l := must(status.NewClient(g.control).List(ctx))
	if !hasMethods(l) {
		return
	}
	method := methodOf(l, "nat")
	if method == "" || strings.Contains(method, "generation poll") {
		check(fmt.Errorf("the agent sees NAT rules by %q", method))
	}
	g.b.method(modeBPF, method)
}

// natTable is a table of DNAT rules.
type natTable struct {
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
	return &natTable{conn, &nftables.Chain{Name: "PREROUTING", Table: table}}
}

// runIn runs a command in a namespace, nil for this one, to its end, and returns its output.
func runIn(s *netns.Space, cmd *exec.Cmd) string {
	var out, problem strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &problem
	start := cmd.Start
	if s != nil {
		start = func() error { return s.Start(cmd) }
	}
	check(start())
	if err := cmd.Wait(); err != nil {
		check(fmt.Errorf("%s: %w: %s", cmd, err, problem.String()))
	}
	return out.String()
}

// commit adds a rule by netlink, as iptables would.
func (t *natTable) commit(p uint16) {
	to := net.IPv4(10, 3, 0, 1)
	t.conn.AddRule(&nftables.Rule{Table: t.chain.Table, Chain: t.chain, Exprs: []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{unix.IPPROTO_TCP}},
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: binaryutil.BigEndian.PutUint16(p)},
		&expr.Target{Name: "DNAT", Rev: 2, Info: &xt.NatRange2{NatRange: xt.NatRange{Flags: uint(xt.NatRangeMapIPs), MinIP: to, MaxIP: to}}},
	}})
	check(t.conn.Flush())
}

// clear removes all rules.
func (t *natTable) clear() {
	t.conn.FlushChain(t.chain)
	check(t.conn.Flush())
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
