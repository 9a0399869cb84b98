// SPDX-License-Identifier: Apache-2.0

//go:build linux && root

package e2e

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/test/kit/echo"
	"github.com/fairlead/fairlead/test/nat/corpus"
)

// node is the guest's address in the corpus.
var nodes = []netip.Addr{netip.MustParseAddr("192.0.2.2"), netip.MustParseAddr("2001:db8::2")}

// backends is a namespace behind the guest's bridge that has every target address of
// the corpus.
func backends(t *testing.T, guest *space, addresses []netip.Addr) *space {
	t.Helper()
	b := newSpace(t)
	guest.sh(t, fmt.Sprintf(`
/usr/sbin/ip link add eth0 type veth peer name eth0p
/usr/sbin/ip link set eth0p up
/usr/sbin/ip addr add 192.0.2.2/24 dev eth0
/usr/sbin/ip addr add 2001:db8::2/64 dev eth0 nodad
/usr/sbin/ip link set eth0 up
/usr/sbin/ip link add docker0 type bridge
/usr/sbin/ip addr add 172.17.0.1/16 dev docker0
/usr/sbin/ip addr add fd00:17::1/64 dev docker0 nodad
/usr/sbin/ip link set docker0 up
/usr/sbin/ip link add veth0 type veth peer name eth0 netns /proc/%d/fd/%d
/usr/sbin/ip link set veth0 master docker0 up
/usr/sbin/ip route add default via 192.0.2.1
/usr/sbin/ip -6 route add default via 2001:db8::1
/usr/sbin/ip route add 10.0.0.0/8 dev docker0
/usr/sbin/ip route add 172.18.0.0/16 dev docker0
/usr/sbin/ip -6 route add fd00::/16 dev docker0
echo 1 > /proc/sys/net/ipv4/ip_forward
echo 1 > /proc/sys/net/ipv6/conf/all/forwarding`, os.Getpid(), b.FD()))
	script := "/usr/sbin/ip link set eth0 up\n"
	for _, a := range addresses {
		script += fmt.Sprintf("/usr/sbin/ip addr add %s/%d dev eth0", a, a.BitLen())
		if a.Is6() {
			script += " nodad"
		}
		script += "\n"
	}
	b.sh(t, script+`
/usr/sbin/ip route add 172.17.0.1 dev eth0
/usr/sbin/ip route add default via 172.17.0.1
/usr/sbin/ip -6 route add fd00:17::1 dev eth0
/usr/sbin/ip -6 route add default via fd00:17::1`)
	return b
}

// live is a line of the corpus that traffic can take.
type live struct {
	key     string // as the agent names the publication
	network string
	host    string // where the host peer offers it
	targets []netip.AddrPort
}

// family ends the name of a network of one address family.
func family(a netip.Addr) string {
	if a.Is4() {
		return "4"
	}
	return "6"
}

func wildcard(a netip.Addr) netip.Addr {
	if a.Is4() {
		return netip.IPv4Unspecified()
	}
	return netip.IPv6Unspecified()
}

func liveLines(t *testing.T, c corpus.Case) (out []live) {
	t.Helper()
	for _, line := range c.Want {
		if strings.HasPrefix(line, "problem ") || strings.HasSuffix(line, ")") {
			continue // not published
		}
		network, rest, _ := strings.Cut(line, " ")
		at, rest, _ := strings.Cut(rest, " ")
		_, dial, _ := strings.Cut(rest, "] ")
		from := netip.MustParseAddrPort(at)
		l := live{key: network + " " + at, network: network, host: fmt.Sprintf("127.0.0.1:%d", from.Port())}
		if from.Addr().Is6() {
			l.host = fmt.Sprintf("[::1]:%d", from.Port())
		}
		for f := range strings.FieldsSeq(dial) {
			target := netip.MustParseAddrPort(f)
			own := slices.Contains(nodes, target.Addr())
			switch {
			case target.Port() == 0 || target == from || own && target.Port() == from.Port():
			case own: // where REDIRECT leads, in the guest itself
				l.targets = append(l.targets, netip.AddrPortFrom(port.Loopback(target.Addr()), target.Port()))
			default:
				l.targets = append(l.targets, target)
			}
		}
		if len(l.targets) == 0 {
			t.Fatalf("no target in %q", line)
		}
		out = append(out, l)
	}
	return out
}

// The ports that each ruleset of the corpus publishes carry traffic from the host to
// the server behind the rules, although the guest has nothing but a rule for them. The
// incumbent sees only TCP over IPv4, in chains of one name.
func TestTrafficThroughEachRuleset(t *testing.T) {
	cases, err := corpus.Cases()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range cases {
		t.Run(c.Name, func(t *testing.T) { carry(t, c) })
	}
}

func carry(t *testing.T, c corpus.Case) {
	lines := liveLines(t, c)
	var addresses []netip.Addr
	servers := map[string][]netip.AddrPort{}
	for _, l := range lines {
		for _, a := range l.targets {
			if !slices.Contains(servers[l.network], a) {
				servers[l.network] = append(servers[l.network], a)
			}
			if !a.Addr().IsLoopback() && !slices.Contains(addresses, a.Addr()) {
				addresses = append(addresses, a.Addr())
			}
		}
	}
	config := filepath.Join(t.TempDir(), "agent.yaml")
	text := "rules: [{match: {protocol: udp, ports: \"53,5353\"}, action: allow}]\nsource: [nat]\n"
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	r := newRig(t, "--config", config)
	b := backends(t, r.guest, addresses)
	for network, at := range servers {
		for _, a := range at {
			where := b
			if a.Addr().IsLoopback() { // what REDIRECT leads to, on whatever address
				where, a = r.guest, netip.AddrPortFrom(wildcard(a.Addr()), a.Port())
			}
			if network == "tcp" {
				go echo.Serve(where.listen(t, "tcp"+family(a.Addr()), a.String()))
			} else {
				go echo.ServePackets(where.listenPacket(t, "udp"+family(a.Addr()), a.String()))
			}
		}
	}
	for _, s := range c.Sections {
		r.guest.feed(t, s.Text, s.Command...)
	}
	r.start()
	for _, l := range lines {
		r.wantState(l.key, "active")
		r.eventually(l.key+" answers at "+l.host, func() error {
			conn, err := r.outside.Dial(l.network, l.host)
			if err != nil {
				return err
			}
			defer conn.Close()
			return roundTrip(conn, l.key)
		})
	}
}
