// SPDX-License-Identifier: Apache-2.0

//go:build linux && root

package packets

import (
	"fmt"
	"strings"
)

// The second grammar is the first one and what programs write more seldom: sets, maps and
// named objects of every kind, conditions of every module, and other ends of rules. Many of
// these are not understood.

// secondTools are the ways to write rules of the second grammar.
var secondTools = append([]tool{
	{name: "nft-nft-inet-and-iptables-legacy", nft: []string{"FAMILY a", "inet b"}, ipt: "legacy"},
}, tools...)

// defaults are ways to have a default route by $GATEWAY, or one to the stranger alone.
var defaults = []string{
	"route add default via $GATEWAY",
	"route add 0.0.0.0/1 via $GATEWAY\nroute add 128.0.0.0/1 via $GATEWAY",
	"route add default via $GATEWAY table 100\nrule add pref 40000 lookup 100",
	"route add $STRANGER via $GATEWAY",
}

// lead makes one of defaults the only way to the stranger.
func (o *oracle) lead(way string) {
	ip := "/usr/sbin/ip -4 "
	if o.v6 {
		ip = "/usr/sbin/ip -6 "
		way = strings.NewReplacer("0.0.0.0/1", "::/1", "128.0.0.0/1", "8000::/1").Replace(way)
	}
	way = strings.NewReplacer("$GATEWAY", o.family.neighbour, "$STRANGER", o.stranger).Replace(way)
	o.sh(o.guest, "while "+ip+"rule del lookup 100 2>/dev/null; do :; done\n"+
		ip+"route flush table 100 2>/dev/null || :\n"+ip+"route flush proto boot\n"+ip+strings.ReplaceAll(way, "\n", "\n"+ip))
}

// host is an address that a set of sources may have; see source.
func (g *grammar) host() string {
	other := "198.51.100.7"
	if g.f.v6 {
		other = "2001:db8:1::7"
	}
	return oneOf(g.r, g.f.neighbour, g.f.neighbour, g.f.nodes[0], other)
}

// net is a network of such addresses.
func (g *grammar) net() string { return oneOf(g.r, g.f.near, g.f.uplink, g.foreign()) }

// two returns two different ports, the lower one first.
func (g *grammar) two() (a, b int) { return firstPort + g.r.IntN(5), firstPort + 5 + g.r.IntN(5) }

func (g *grammar) verdict() string {
	return oneOf(g.r, "jump c0", "goto c0", "jump c1", "goto c1", "goto c1", "accept", "return", "drop", "continue")
}

// elements are what a set or map of objects holds.
func (g *grammar) elements(name string) string {
	a, b := g.two()
	host, net, verdict, server := g.host(), g.net(), g.verdict(), g.server()
	return strings.NewReplacer("HOST", host, "NET", net, "A", fmt.Sprint(a), "B", fmt.Sprint(b), "V1", verdict, "V2", g.verdict(), "S1", server, "S2", g.server()).Replace(map[string]string{
		"hosts": "HOST", "hosts_timeout": "HOST timeout 1h", "hosts_dynamic": "HOST", "nets": "NET", "nets_timeout": "NET timeout 1h",
		"ends": "HOST . A, HOST . B", "ends_nets": "NET . A-B", "ends_timeout": "HOST . A timeout 1h",
		"ports": "A, B", "ports_nets": "A-B", "ports_timeout": "A timeout 1h, B timeout 1h",
		"v": "A : V1, B : V2", "v_nets": "A-B : V1, * : V2", "v_timeout": "A timeout 1h : V1, B timeout 1h : V2",
		"v_hosts": "NET : V1", "v_ends": "HOST . A : V1, HOST . B : V2",
		"d": "A : S1, B : S2", "d_nets": "A-B : S1", "d_timeout": "A timeout 1h : S1", "d_ends": "A : S1 . 80, B : S2 . 81",
		"d_both": "NET . A-B : S1 . 80", "r": "A : 7000, B : 7002", "counters": `A : "c"`,
	}[name])
}

// sets are the sets and maps of a table, with their types.
var sets = [][2]string{
	{"hosts", "ADDR"}, {"hosts_timeout", "ADDR; flags timeout"}, {"hosts_dynamic", "ADDR; flags dynamic; size 16"},
	{"nets", "ADDR; flags interval"}, {"nets_timeout", "ADDR; flags interval,timeout"},
	{"ends", "ADDR . inet_service"}, {"ends_nets", "ADDR . inet_service; flags interval"}, {"ends_timeout", "ADDR . inet_service; flags timeout"},
	{"ports", "inet_service"}, {"ports_nets", "inet_service; flags interval"}, {"ports_timeout", "inet_service; flags timeout"},
	{"v", "inet_service : verdict"}, {"v_nets", "inet_service : verdict; flags interval"}, {"v_timeout", "inet_service : verdict; flags timeout"},
	{"v_hosts", "ADDR : verdict; flags interval"}, {"v_ends", "ADDR . inet_service : verdict"},
	{"d", "inet_service : ADDR"}, {"d_nets", "inet_service : ADDR; flags interval"}, {"d_timeout", "inet_service : ADDR; flags timeout"},
	{"d_ends", "inet_service : ADDR . inet_service"}, {"d_both", "ADDR . inet_service : ADDR . inet_service; flags interval"},
	{"r", "inet_service : inet_service"}, {"counters", "inet_service : counter"},
}

func kindOf(typ string) string {
	if strings.Contains(typ, " : ") {
		return "map"
	}
	return "set"
}

// objects are the sets, maps and named objects of a table.
func (g *grammar) objects() string {
	typ := "ipv4_addr"
	if g.f.v6 {
		typ = "ipv6_addr"
	}
	b := fmt.Sprintf("\tcounter c { }\n\tlimit l { rate 1000/second; }\n\tquota q { over 100 mbytes; }\n\tset seen { type %s; flags dynamic,timeout; size 64; }\n", typ)
	for _, s := range sets {
		b += fmt.Sprintf("\t%s %s { type %s; elements = { %s }; }\n", kindOf(s[1]), s[0], strings.ReplaceAll(s[1], "ADDR", typ), g.elements(s[0]))
	}
	return b
}

// in names a set of objects, or sometimes all that is not in it.
func (g *grammar) in(names ...string) string {
	return oneOf(g.r, "@", "@", "!= @") + oneOf(g.r, names...)
}

// condition is one that the first grammar does not have, or a change of the packet.
func (g *grammar) condition(hook string) string {
	ip := g.f.name
	prefix, odd, life := "255.255.255.0 == 192.0.2.0", "0.0.0.255 == 0.0.0.1", "ip ttl"
	if g.f.v6 {
		prefix, odd, life = "ffff:ffff:ffff:: == 2001:db8::", "::ff == ::1", "ip6 hoplimit"
	}
	switch g.r.IntN(12) {
	case 0, 1:
		return ip + " saddr " + g.in("hosts", "hosts_timeout", "hosts_dynamic", "nets", "nets_timeout")
	case 2:
		return ip + " saddr . th dport " + g.in("ends", "ends_nets", "ends_timeout")
	case 3:
		return ip + " daddr . th dport " + g.in("ends", "ends_nets", "ends_timeout")
	case 4:
		return "th dport " + g.in("ports", "ports_nets", "ports_timeout")
	case 5:
		return oneOf(g.r, "ct original "+ip+" saddr "+g.source(), "ct original "+ip+" saddr != "+g.source(), "ct original "+ip+" daddr "+g.own(),
			"ct original "+ip+" daddr != "+g.own())
	case 6:
		return oneOf(g.r, ip+" dscp set cs1", life+" set 64")
	case 7:
		return oneOf(g.r, `limit name "l"`, `quota name "q"`, `counter name "c"`, "counter name th dport map @counters", "limit rate 1000/second",
			"quota over 100 mbytes", "ct count over 1000", "counter")
	case 8:
		return oneOf(g.r, "ct mark 0", "ct mark != 0", "ct direction original", "ct state { new, established }", "ct status ! snat")
	case 9:
		return oneOf(g.r, ip+" dscp cs0", life+" > 1", "meta length > 20", "th sport 1024-65535", "meta cpu < 64", "meta priority 0",
			fmt.Sprintf("@th,16,16 %d", g.port()))
	case 10:
		return oneOf(g.r, ip+" saddr & "+prefix, ip+" saddr & "+odd, "update @seen { "+ip+" saddr timeout 1m }",
			"update @seen { "+ip+" saddr limit rate over 1000/second }")
	}
	if hook == "prerouting" {
		return oneOf(g.r, "fib daddr . iif type local", "meta pkttype host", "iifgroup 0", "iiftype ether", "fib saddr . iif oif != 0")
	}
	return oneOf(g.r, "meta skuid 0", "oifgroup 0")
}

// end is a rule with an end that the first grammar does not have.
func (g *grammar) end(m, ip string) string {
	a, b := g.server(), g.server()
	to := m + " dnat " + ip + " to "
	switch g.r.IntN(13) {
	case 0:
		return to + "th dport map @" + oneOf(g.r, "d", "d_nets", "d_timeout")
	case 1:
		return to + "th dport map @d_ends"
	case 2:
		return to + g.f.name + " saddr . th dport map @d_both"
	case 3:
		return to + fmt.Sprintf("numgen %s mod 10 map { 0-4 : %s, 5-9 : %s }", oneOf(g.r, "inc", "random"), a, b)
	case 4:
		return to + fmt.Sprintf("jhash th sport mod 10 map { 0-4 : %s, 5-9 : %s }", a, b)
	case 5:
		return fmt.Sprintf("%s dnat %s prefix to %s daddr map { %s : %s }", m, ip, g.f.name, g.f.uplink, g.f.behind)
	case 6:
		return m + " th dport vmap @" + oneOf(g.r, "v", "v_nets", "v_timeout")
	case 7:
		return m + oneOf(g.r, " "+g.f.name+" saddr vmap @v_hosts", " "+g.f.name+" saddr . th dport vmap @v_ends")
	case 8:
		return m + fmt.Sprintf(" numgen random mod 10 vmap { 0-6 : %s c0, 7-9 : goto c1 }", oneOf(g.r, "jump", "goto"))
	case 9:
		return m + " redirect to :th dport map @r"
	case 10:
		return to + g.at(g.f.loopback, oneOf(g.r, "7000", "7001"))
	case 11:
		return to + g.at(a, "9000-9002") + oneOf(g.r, " random", " persistent")
	}
	return m + " " + g.verdict()
}

// nftChange changes objects of a table, or what the first grammar leaves as it is.
func (g *grammar) nftChange(table string) string {
	s := sets[g.r.IntN(len(sets))]
	name, flush := s[0], fmt.Sprintf("flush %s %s %s\n", kindOf(s[1]), table, s[0])
	switch g.r.IntN(6) {
	case 0:
		return fmt.Sprintf("add table %s { flags dormant; }\n", table)
	case 1:
		return fmt.Sprintf("add table %s\n", table)
	case 2:
		chain := oneOf(g.r, "c0", "c1", "pre")
		back := ""
		if g.one(2) {
			back = fmt.Sprintf(nextCommit+"rename chain %s other %s\n", table, chain)
		}
		return fmt.Sprintf("rename chain %[1]s %[2]s other\n"+nextCommit+"add rule %[1]s other %[3]s dnat to %[4]s\n%[5]s", table, chain,
			fmt.Sprintf("tcp dport %d", g.port()), g.at(g.server(), "80"), back)
	case 3:
		return flush
	}
	return flush + fmt.Sprintf("add element %s %s { %s }\n", table, name, g.elements(name))
}

// iptCondition is a match that the first grammar does not have.
func (g *grammar) iptCondition(hook string) string {
	life := "-m ttl --ttl-gt 1"
	if g.f.v6 {
		life = "-m hl --hl-gt 1"
	}
	not := oneOf(g.r, "", "", "! ")
	switch g.r.IntN(5) {
	case 0:
		return "-m conntrack " + oneOf(g.r, "--ctstate NEW", not+"--ctorigdst "+g.own(), not+"--ctorigsrc "+g.source(), "--ctdir ORIGINAL",
			not+"--ctorigdstport "+fmt.Sprint(g.port())+" --ctproto tcp")
	case 1:
		return "-m iprange " + not + oneOf(g.r, "--src-range "+g.f.neighbour+"-"+g.f.nodes[0], "--dst-range "+g.f.nodes[0]+"-"+g.f.nodes[1])
	case 2:
		return oneOf(g.r, "-m limit --limit 1000/second", "-m hashlimit --hashlimit-upto 1000/second --hashlimit-name h", "-m connlimit --connlimit-upto 1000",
			"-m quota --quota 100000000")
	case 3:
		return oneOf(g.r, "-m mark --mark 0", "-m connmark --mark 0", "-m state --state NEW", "-m comment --comment one", "-m cpu --cpu 0")
	}
	if hook == "OUTPUT" {
		return oneOf(g.r, "-m owner --uid-owner 0", life)
	}
	return oneOf(g.r, "-m length --length 20:65535", life, "-m dscp --dscp 0", "-m pkttype --pkt-type unicast")
}

// iptEnd is an end of a rule that the first grammar does not have.
func (g *grammar) iptEnd() string {
	return oneOf(g.r, " -j NETMAP --to "+g.server(),
		" -j DNAT --to-destination "+g.at(g.server(), "80")+" --persistent", " -j DNAT --to-destination "+g.at(g.f.loopback, "7000"),
		" -j REDIRECT --to-ports 7000-7002", " -j MARK --set-mark 1", " -j CONNMARK --set-mark 1")
}
