// SPDX-License-Identifier: Apache-2.0

//go:build linux && root

package packets

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/status"
	"github.com/fairlead/fairlead/test/kit/program"
)

// meaning is a ruleset that is easily mistaken, and what connections meet.
type meaning struct {
	name  string
	tools []string // that write it; nft if empty
	steps []step
}

// step changes the ruleset.
type step struct {
	with string // the tool, if not the meaning's
	load string // as nft reads it, or rules of iptables's nat table
	want []want
}

// want is what is so about one port. It is published if clients outside reach a
// server, and a client of the host is to reach the same one, unless says differs.
type want struct {
	at      string   // "tcp 1001"
	outside []string // servers that clients outside reach, any of them
	says    says
}

// says is what fairlead makes of a port.
type says uint8

const (
	usual     says = iota
	published      // though no server answers
	listed         // not published, and explain names the rule
	uncertain      // explain reports that clients of the host may reach another server
	partly         // published at some addresses, and withheld at others with the reason
)

// Servers, by the names that rulesets give them; see [oracle.fill].
const (
	serverA    = "$ADDRA port 80"
	serverB    = "$ADDRB port 80"
	serverC    = "$ADDRC port 80"
	everywhere = "the guest's own everywhere"
	atNode     = "the guest's own at $OTHERNODE"
)

func reaches(at string, servers ...string) want { return want{at: at, outside: servers} }

func closed(at string) want { return want{at: at} }

func table(chains ...string) string {
	return "table $FAMILY t {\n" + strings.Join(chains, "\n") + "\n}\n"
}

func pre(rules ...string) string { return base("pre", "prerouting", -100, rules...) }

func base(name, hook string, priority int, rules ...string) string {
	return fmt.Sprintf("chain %s { type nat hook %s priority %d; %s; }", name, hook, priority, strings.Join(rules, "; "))
}

func lines(l ...string) string { return strings.Join(l, "\n") + "\n" }

// iptables are its back ends, in both families.
var iptables = []string{"iptables-nft", "iptables-legacy", "ip6tables-nft", "ip6tables-legacy"}

var meanings = slices.Concat(limitedRules, deadRules, ownAddresses, order, conditions, manyPorts, divided, dialTargets)

// Rules for some clients only, before rules for all.
var limitedRules = []meaning{
	{"limited to sources or interfaces", iptables, []step{{load: lines(
		"-A PREROUTING -s $ELSEWHERE -p tcp --dport 1001 -j DNAT --to-destination $A",
		"-A PREROUTING               -p tcp --dport 1001 -j DNAT --to-destination $B",
		"-A PREROUTING -s $ELSEWHERE -p udp --dport 1002 -j DNAT --to-destination $A",
		"-A PREROUTING               -p udp --dport 1002 -j DNAT --to-destination $B",
		"-A PREROUTING -i docker0    -p tcp --dport 1003 -j DNAT --to-destination $A",
		"-A PREROUTING               -p tcp --dport 1003 -j DNAT --to-destination $B",
	), want: []want{reaches("tcp 1001", serverB), reaches("udp 1002", serverB), reaches("tcp 1003", serverB)}}}},
	{"limited to sources or interfaces", []string{"nft", "nft6"}, []step{{load: table(pre(
		"$FAMILY saddr $ELSEWHERE tcp dport 1001 dnat to $A", "tcp dport 1001 dnat to $B",
		"$FAMILY saddr $ELSEWHERE udp dport 1002 dnat to $A", "udp dport 1002 dnat to $B",
		`iifname "docker0" tcp dport 1003 dnat to $A`, "tcp dport 1003 dnat to $B",
	)), want: []want{reaches("tcp 1001", serverB), reaches("udp 1002", serverB), reaches("tcp 1003", serverB)}}}},
	{"limited to clients that reach it", iptables, []step{{load: lines(
		"-A PREROUTING -s $NEIGHBOUR   -p tcp --dport 1001 -j DNAT --to-destination $A",
		"-A PREROUTING                 -p tcp --dport 1001 -j DNAT --to-destination $B",
		"-A PREROUTING -s $NET         -p tcp --dport 1002 -j DNAT --to-destination $A",
		"-A PREROUTING -s $NEIGHBOUR   -p udp --dport 1003 -j DNAT --to-destination $A",
		"-A PREROUTING ! -s $NEIGHBOUR -p tcp --dport 1004 -j DNAT --to-destination $A",
	), want: []want{reaches("tcp 1001", serverB), {at: "tcp 1002", says: listed}, {at: "udp 1003", says: listed}, reaches("tcp 1004", serverA)}}}},
	{"limited to clients that reach it", []string{"nft", "nft6"}, []step{{load: table(pre(
		"$FAMILY saddr $NEIGHBOUR tcp dport 1001 dnat to $A", "tcp dport 1001 dnat to $B",
		"$FAMILY saddr $NET tcp dport 1002 dnat to $A",
		"$FAMILY saddr != $NEIGHBOUR tcp dport 1004 dnat to $A",
	)), want: []want{reaches("tcp 1001", serverB), {at: "tcp 1002", says: listed}, reaches("tcp 1004", serverA)}}}},
	{"limited to a list that changes", []string{"nft", "nft6"}, []step{{load: table(
		"set s { typeof $FAMILY saddr; flags timeout; elements = { $NEIGHBOUR timeout 1h }; }",
		"set d { typeof $FAMILY saddr; flags dynamic; size 16; elements = { $NEIGHBOUR }; }",
		"chain guard { $FAMILY saddr @s return; drop; }", "chain deny { drop; }",
		pre("tcp dport 1001 $FAMILY saddr != @s return", "tcp dport 1001 dnat to $A",
			"tcp dport 1002 $FAMILY saddr != @d jump deny", "tcp dport 1002 dnat to $A",
			"tcp dport 1003 jump guard", "tcp dport 1003 dnat to $A",
			"udp dport 1004 $FAMILY saddr != @d accept", "udp dport 1004 dnat to $A",
			"tcp dport 1005 $FAMILY saddr @s drop", "tcp dport 1005 dnat to $A"),
	), want: []want{{at: "tcp 1001", says: listed}, {at: "tcp 1002", says: listed}, {at: "tcp 1003", says: listed}, {at: "udp 1004", says: listed},
		reaches("tcp 1005", serverA)}}}},
	{"server changes", iptables, []step{
		{load: "-A PREROUTING -p tcp --dport 1003 -j DNAT --to-destination $A", want: []want{reaches("tcp 1003", serverA)}},
		{load: "-I PREROUTING ! -i docker0 -p tcp --dport 1003 -j DNAT --to-destination $C", want: []want{reaches("tcp 1003", serverC)}},
		{load: "-D PREROUTING ! -i docker0 -p tcp --dport 1003 -j DNAT --to-destination $C", want: []want{reaches("tcp 1003", serverA)}},
	}},
	{"server changes for all hooks", iptables, []step{
		{load: lines("-A PREROUTING -p tcp --dport 1003 -j DNAT --to-destination $A",
			"-A OUTPUT -p tcp --dport 1003 -j DNAT --to-destination $A"), want: []want{reaches("tcp 1003", serverA)}},
		{load: lines("-I PREROUTING -p tcp --dport 1003 -j DNAT --to-destination $C",
			"-I OUTPUT -p tcp --dport 1003 -j DNAT --to-destination $C"), want: []want{reaches("tcp 1003", serverC)}},
	}},
}

// Rules that no packet meets take none from later ones.
var deadRules = []meaning{
	{"dead after return", iptables, []step{{load: lines(
		":S - [0:0]",
		"-A PREROUTING -j S",
		"-A PREROUTING -p tcp --dport 1001 -j DNAT --to-destination $B",
		"-A PREROUTING -p udp --dport 1002 -j DNAT --to-destination $B",
		"-A S -p tcp --dport 1001 -j RETURN",
		"-A S -p tcp --dport 1001 -j DNAT --to-destination $A",
		"-A S -p udp --dport 1002 -j RETURN",
		"-A S -p udp --dport 1002 -j DNAT --to-destination $A",
	), want: []want{reaches("tcp 1001", serverB), reaches("udp 1002", serverB)}}}},
	{"dead after return", []string{"nft", "nft6"}, []step{{load: table(
		"chain s { tcp dport 1001 return; tcp dport 1001 dnat to $A; }",
		pre("jump s", "tcp dport 1001 dnat to $B"),
	), want: []want{reaches("tcp 1001", serverB)}}}},
	{"dead after accept", []string{"nft", "nft6"}, []step{{load: table(
		pre("tcp dport 1001 accept", "tcp dport 1001 dnat to $A"),
		base("later", "prerouting", -90, "tcp dport 1001 dnat to $B"),
	), want: []want{reaches("tcp 1001", serverB)}}}},
	{"dead after goto", []string{"nft", "nft6"}, []step{{load: table(
		"chain s { tcp dport 1002 return; }",
		pre("tcp dport 1001 goto s", "tcp dport 1001 dnat to $A"),
		base("later", "prerouting", -90, "tcp dport 1001 dnat to $B"),
	), want: []want{reaches("tcp 1001", serverB)}}}},
}

// Rules for some of the machine's own addresses.
var ownAddresses = []meaning{
	{"transparent proxy", iptables, []step{{
		load: "-A PREROUTING -i eth0 ! -d $NET -p tcp --dport 1001 -j REDIRECT --to-ports 7000",
		want: []want{closed("tcp 1001")},
	}}},
	{"loopback in prerouting", iptables, []step{{
		load: "-A PREROUTING -d $LOOPBACK -p tcp --dport 1001 -j DNAT --to-destination $A",
		want: []want{closed("tcp 1001")},
	}}},
	{"network of two own addresses", iptables, []step{{
		load: "-A PREROUTING -d $NET -p tcp --dport 1001 -j DNAT --to-destination $A",
		want: []want{reaches("tcp 1001", serverA)},
	}}},
	{"node address before any", iptables, []step{{load: lines(
		"-A PREROUTING -d $NODE -p tcp --dport 1001 -j DNAT --to-destination $A",
		"-A PREROUTING -p tcp --dport 1001 -j DNAT --to-destination $B",
	), want: []want{reaches("tcp 1001", serverA)}}}},
}

// Chains in the order in which packets meet them.
var order = []meaning{
	{"policy drop", nil, []step{{load: lines(
		"table ip a { chain pre { type nat hook prerouting priority -110; policy drop; tcp dport 1001 accept; }; }",
		"table ip b { chain pre { type nat hook prerouting priority -100; tcp dport {1001,1002} dnat to $A; }; }",
	), want: []want{reaches("tcp 1001", serverA), closed("tcp 1002")}}}},
	{"renamed chain", nil, []step{
		{load: table("chain user { tcp dport 1002 dnat to $A; }", pre("jump user")), want: []want{reaches("tcp 1002", serverA)}},
		{load: "rename chain ip t user user2"},
		{load: "add rule ip t user2 tcp dport 1003 dnat to $A",
			want: []want{reaches("tcp 1002", serverA), reaches("tcp 1003", serverA)}},
		{load: lines("add chain ip t user", "add rule ip t user tcp dport 1004 dnat to $A"),
			want: []want{reaches("tcp 1003", serverA), closed("tcp 1004")}},
	}},
	{"newest table of one priority", nil, []step{
		{load: "table ip a { chain pre { type nat hook prerouting priority dstnat; tcp dport 1001 dnat to $A; }; }"},
		{load: "table ip b { chain pre { type nat hook prerouting priority dstnat; tcp dport 1001 dnat to $B; }; }",
			want: []want{reaches("tcp 1001", serverB)}},
	}},
	{"newest table of one priority, by name the last", nil, []step{
		{load: "table ip b { chain pre { type nat hook prerouting priority dstnat; tcp dport 1001 dnat to $B; }; }"},
		{load: "table ip a { chain pre { type nat hook prerouting priority dstnat; tcp dport 1001 dnat to $A; }; }",
			want: []want{reaches("tcp 1001", serverA)}},
	}},
	{"inet, then iptables-nft", nil, []step{
		{load: "table inet filterish { chain pre { type nat hook prerouting priority dstnat; tcp dport 1001 dnat ip to $A; }; }"},
		{with: "iptables-nft", load: "-A PREROUTING -p tcp --dport 1001 -j DNAT --to-destination $B", want: []want{reaches("tcp 1001", serverB)}},
	}},
	{"iptables-nft, then inet", nil, []step{
		{with: "iptables-nft", load: "-A PREROUTING -p tcp --dport 1001 -j DNAT --to-destination $B"},
		{load: "table inet filterish { chain pre { type nat hook prerouting priority dstnat; tcp dport 1001 dnat ip to $A; }; }",
			want: []want{reaches("tcp 1001", serverA)}},
	}},
	{"newest chain of one table", nil, []step{
		{load: table(pre("tcp dport 1001 dnat to $A"))},
		{load: table(base("another", "prerouting", -100, "tcp dport 1001 dnat to $B")), want: []want{reaches("tcp 1001", serverB)}},
	}},
}

// Conditions that are not for every packet.
var conditions = []meaning{
	{"mark", nil, []step{{load: table(pre(
		"tcp dport { 1001, 1002 } meta mark set 1", "meta mark 1 tcp dport 1001 return", "tcp dport 1001 dnat to $A",
		"meta mark 0 tcp dport 1002 dnat to $A", "meta mark 1 tcp dport 1002 dnat to $B",
	)), want: []want{closed("tcp 1001"), {at: "tcp 1002", outside: []string{serverB}, says: listed}}}}},
	{"mark", iptables, []step{{load: lines(
		"-A PREROUTING -p tcp --dport 1001 -j MARK --set-mark 1",
		"-A PREROUTING -m mark --mark 1 -j RETURN",
		"-A PREROUTING -p tcp --dport 1001 -j DNAT --to-destination $A",
	), want: []want{closed("tcp 1001")}}}},
	{"named objects", nil, []step{{load: table(
		"limit l { rate over 1000/second; }", "quota q { over 100 mbytes; }", "counter c { }",
		"map m { type inet_service : counter; elements = { 1003 : \"c\" }; }",
		pre(`tcp dport 1001 limit name "l" dnat to $A`, `tcp dport 1002 quota name "q" dnat to $A`,
			`tcp dport { 1003, 1004 } counter name tcp dport map @m dnat to $A`, `tcp dport 1005 counter name "c" dnat to $A`),
	), want: []want{closed("tcp 1001"), closed("tcp 1002"), {at: "tcp 1003", outside: []string{serverA}, says: listed},
		closed("tcp 1004"), reaches("tcp 1005", serverA)}}}},
	{"limit for each source", nil, []step{{load: table(
		"set s { type ipv4_addr; flags dynamic; timeout 1m; }",
		pre("tcp dport 1001 update @s { ip saddr limit rate over 1000/second } dnat to $A"),
	), want: []want{closed("tcp 1001")}}}},
	{"balanced by weight", nil, []step{{load: table(
		"chain a { meta l4proto tcp dnat to $A; }", "chain b { meta l4proto tcp dnat to $B; }",
		pre("tcp dport 1001 dnat to numgen inc mod 10 map { 0-4 : $ADDRA, 5-9 : $ADDRB }",
			"tcp dport 1002 numgen random mod 100 vmap { 0-69 : jump a, 70-99 : jump b }",
			"tcp dport 1003 dnat to jhash ip saddr mod 10 map { 0-4 : $ADDRA, 5-9 : $ADDRB }"),
	), want: []want{reaches("tcp 1001", "$ADDRA port 1001", "$ADDRB port 1001"), reaches("tcp 1002", serverA, serverB),
		reaches("tcp 1003", "$ADDRA port 1003", "$ADDRB port 1003")}}}},
	{"verdicts that change", []string{"nft", "nft6"}, []step{{load: table(
		"chain a { meta l4proto tcp dnat to $A; }",
		"map m { type inet_service : verdict; flags timeout; elements = { 1001 timeout 1h : goto a }; }",
		pre("tcp dport vmap @m", "tcp dport { 1001, 1002 } dnat to $B"),
	), want: []want{{at: "tcp 1001", outside: []string{serverA}, says: listed}, {at: "tcp 1002", outside: []string{serverB}, says: listed}}}}},
	{"ends of a connection", []string{"nft", "nft6"}, []step{{load: table(pre(
		"ct original $FAMILY daddr $NET tcp dport 1001 dnat to $A", "ct original $FAMILY daddr $NEIGHBOUR tcp dport 1002 dnat to $A",
		"ct original $FAMILY saddr $NEIGHBOUR tcp dport 1003 dnat to $A", "ct original $FAMILY saddr != $NEIGHBOUR tcp dport 1004 dnat to $A",
	)), want: []want{reaches("tcp 1001", serverA), closed("tcp 1002"), {at: "tcp 1003", says: listed}, reaches("tcp 1004", serverA)}}}},
	{"packets that are changed", []string{"nft", "nft6"}, []step{{load: table(pre(
		"tcp dport 1001 $FAMILY dscp set cs1 dnat to $A", "tcp dport 1002 $FAMILY dscp set cs1", "tcp dport 1002 dnat to $A",
	)), want: []want{reaches("tcp 1001", serverA), reaches("tcp 1002", serverA)}}}},
	{"packets with another time to live", nil, []step{{load: table(pre(
		"tcp dport 1001 ip ttl set 64 dnat to $A",
	)), want: []want{reaches("tcp 1001", serverA)}}}},
	{"prefix mapping", iptables, []step{{
		load: "-A PREROUTING -d $NODE -p tcp --dport 1001 -j NETMAP --to $ADDRA",
		want: []want{{at: "tcp 1001", outside: []string{"$ADDRA port 1001"}, says: listed}},
	}}},
	{"rejected", []string{"nft", "nft6"}, []step{{load: table(pre("tcp dport 1001 reject with tcp reset", "tcp dport 1001 dnat to $A")),
		want: []want{closed("tcp 1001")}}}},
	{"flags of tcp", nil, []step{{load: table(pre(
		"tcp flags & (fin | syn | rst | ack) == syn tcp dport 1001 dnat to $A", "tcp flags syn tcp dport 1002 dnat to $A",
		"tcp flags & (fin | syn | rst | ack) != syn tcp dport 1003 dnat to $A", "tcp flags ack tcp dport 1004 dnat to $A",
	)), want: []want{reaches("tcp 1001", serverA), reaches("tcp 1002", serverA), closed("tcp 1003"), closed("tcp 1004")}}}},
	{"flags of tcp", iptables, []step{{load: lines(
		"-A PREROUTING -p tcp --dport 1001 --syn -j DNAT --to-destination $A",
		"-A PREROUTING -p tcp --dport 1002 --tcp-flags SYN,RST SYN -j DNAT --to-destination $A",
		"-A PREROUTING -p tcp --dport 1003 ! --tcp-flags ALL SYN -j DNAT --to-destination $A",
		"-A PREROUTING -p tcp --dport 1004 ! --syn -j DNAT --to-destination $A",
	), want: []want{reaches("tcp 1001", serverA), reaches("tcp 1002", serverA), closed("tcp 1003"), closed("tcp 1004")}}}},
}

// Rules for more ports than are published.
var manyPorts = []meaning{
	{"as many ports as configured", iptables, []step{{
		load: "-A PREROUTING -p tcp --dport 1001:1100 -j DNAT --to-destination $A",
		want: []want{reaches("tcp 1001", serverA), reaches("tcp 1010", serverA)},
	}}},
	{"more ports than configured", iptables, []step{{
		load: "-A PREROUTING -p tcp --dport 1001:1101 -j DNAT --to-destination $A",
		want: []want{{at: "tcp 1001", outside: []string{serverA}, says: listed}},
	}}},
}

// Rules that divide packets by address, type, mark or base chain.
var divided = []meaning{
	{"limited at one address", iptables, []step{{load: lines(
		"-A PREROUTING -d $OTHERNODE ! -s $ELSEWHERE -p tcp --dport 1001 -j RETURN",
		"-A PREROUTING -p tcp --dport 1001 -j DNAT --to-destination $A",
	), want: []want{reaches("tcp 1001", serverA)}}}},
	{"not understood at one address", iptables, []step{{load: lines(
		"-A PREROUTING -d $NODE -m length --length 0:65535 -p tcp --dport 1001 -j DNAT --to-destination $B",
		"-A PREROUTING -p tcp --dport 1001 -j DNAT --to-destination $A",
	), want: []want{{at: "tcp 1001", outside: []string{serverB}, says: partly}}}}},
	{"address types", iptables, []step{{load: lines(
		"-A PREROUTING -p tcp --dport 1001 -m addrtype ! --src-type UNICAST -j DNAT --to-destination $A",
		"-A PREROUTING -p tcp --dport 1002 -m addrtype --src-type UNICAST --dst-type LOCAL -j DNAT --to-destination $A",
	), want: []want{closed("tcp 1001"), reaches("tcp 1002", serverA)}}}},
	{"several address types", iptables[:2], []step{{load: "-A PREROUTING -p tcp --dport 1001 -m addrtype --src-type LOCAL,UNICAST -j DNAT --to-destination $A",
		want: []want{reaches("tcp 1001", serverA)}}}},
	{"several address types", iptables[2:], []step{{load: "-A PREROUTING -p tcp --dport 1001 -m addrtype --src-type LOCAL,UNICAST -j DNAT --to-destination $A",
		want: []want{closed("tcp 1001")}}}}, // it has to be both
	{"address types", []string{"nft", "nft6"}, []step{{load: table(pre(
		"tcp dport 1001 fib saddr type != unicast dnat to $A", "tcp dport 1002 fib saddr type unicast dnat to $A",
		"tcp dport 1003 fib daddr type { local, broadcast } dnat to $A", "tcp dport 1004 fib daddr type != unicast dnat to $A",
		"tcp dport 1005 fib daddr type unicast dnat to $A",
	)), want: []want{closed("tcp 1001"), reaches("tcp 1002", serverA), reaches("tcp 1003", serverA), reaches("tcp 1004", serverA),
		closed("tcp 1005")}}}},
	{"mark of a filter chain", nil, []step{
		{load: table("chain filter { type filter hook prerouting priority -150; tcp dport 1001 meta mark set 1; }",
			pre("meta mark 0 tcp dport 1001 dnat to $A", "tcp dport 1001 dnat to $B")),
			want: []want{{at: "tcp 1001", outside: []string{serverB}, says: listed}}},
		{load: "flush chain ip t filter", want: []want{reaches("tcp 1001", serverA)}},
	}},
	{"mark of another table", []string{"nft", "nft6"}, []step{{
		load: "table $FAMILY m { chain pre { type filter hook prerouting priority -150; tcp dport { 1001, 1003, 1004 } meta mark set 1; }; }\n" +
			table(pre("meta mark 1 tcp dport { 1001, 1002 } dnat to $B", "tcp dport { 1001, 1002 } dnat to $A",
				"meta mark 0 tcp dport 1003 dnat to $A", "tcp dport 1003 dnat to $B",
				"meta mark 0 tcp dport 1004 return", "tcp dport 1004 dnat to $A")),
		want: []want{
			{at: "tcp 1001", outside: []string{serverB}, says: uncertain}, {at: "tcp 1002", outside: []string{serverA}, says: uncertain},
			{at: "tcp 1003", outside: []string{serverB}, says: uncertain}, {at: "tcp 1004", outside: []string{serverA}, says: listed},
		},
	}}},
	{"mark in a chain that is no longer reached", nil, []step{
		{load: table("chain marks { tcp dport 1001 meta mark set 1; }",
			pre("jump marks", "meta mark 0 tcp dport 1001 dnat to $A", "tcp dport 1001 dnat to $B")),
			want: []want{{at: "tcp 1001", outside: []string{serverB}, says: listed}}},
		{load: "flush chain ip t pre\nflush chain ip t marks\ndelete chain ip t marks\nadd rule ip t pre meta mark 0 tcp dport 1001 dnat to $A",
			want: []want{reaches("tcp 1001", serverA)}},
	}},
	{"chain made anew in an older table", nil, []step{
		{load: "table ip a { chain pre { type nat hook prerouting priority dstnat; tcp dport 1001 dnat to $A; }; }"},
		{load: "table ip b { chain pre { type nat hook prerouting priority dstnat; tcp dport 1001 dnat to $B; }; }",
			want: []want{reaches("tcp 1001", serverB)}},
		{load: "flush chain ip a pre\ndelete chain ip a pre\nadd chain ip a pre { type nat hook prerouting priority dstnat; }\nadd rule ip a pre tcp dport 1001 dnat to $A",
			want: []want{reaches("tcp 1001", serverA)}},
	}},
	{"dormant table woken", nil, []step{
		{load: "table ip a { chain pre { type nat hook prerouting priority dstnat; tcp dport 1001 dnat to $A; }; }"},
		{load: "table ip b { chain pre { type nat hook prerouting priority dstnat; tcp dport 1001 dnat to $B; }; }"},
		{load: "add table ip a { flags dormant; }", want: []want{reaches("tcp 1001", serverB)}},
		{load: "add table ip a", want: []want{reaches("tcp 1001", serverA)}},
	}},
	{"legacy and nft of one priority", nil, []step{
		{load: "table ip a { chain pre { type nat hook prerouting priority dstnat; tcp dport 1001 dnat to $A; }; }"},
		{with: "iptables-legacy", load: "-A PREROUTING -p tcp --dport 1001 -j DNAT --to-destination $B",
			want: []want{{at: "tcp 1001", outside: []string{serverA, serverB}, says: uncertain}}},
	}},
	{"taken for all others, then another table", nil, []step{
		{load: table("chain older { type nat hook prerouting priority -80; tcp dport 1001 redirect to :7002; }")},
		{load: "table ip a { chain pre { type nat hook prerouting priority -100; fib saddr type unicast tcp dport 1001 redirect to :7001; }; }",
			want: []want{{at: "tcp 1001", says: published}}},
	}},
	{"balanced, then another table", nil, []step{{load: lines(
		"table ip a { chain pre { type nat hook prerouting priority -80; tcp dport 1001 dnat to $C; }; }",
		"table ip b { chain pre { type nat hook prerouting priority -100; tcp dport 1001 dnat to numgen inc mod 2 map { 0 : $ADDRA, 1 : $ADDRB }; }; }",
	), want: []want{reaches("tcp 1001", "$ADDRA port 1001", "$ADDRB port 1001")}}}},
}

// Where the agent itself has to connect.
var dialTargets = []meaning{
	{"target caught in output", iptables, []step{{load: lines(
		"-A PREROUTING -p tcp --dport 1001 -j DNAT --to-destination $A",
		"-A OUTPUT -p tcp --dport 80 -j REDIRECT --to-ports 7000",
	), want: []want{{at: "tcp 1001", outside: []string{serverA}, says: uncertain}}}}},
	{"target dropped in output", nil, []step{{load: table(
		pre("tcp dport 1001 dnat to $A"), base("out", "output", -100, "tcp dport 80 drop"),
	), want: []want{{at: "tcp 1001", outside: []string{serverA}, says: uncertain}}}}},
	{"output rule that leaves out a source of other networks", iptables, []step{{load: lines(
		"-A PREROUTING -p tcp --dport 1001 -j DNAT --to-destination $ADDRA",
		"-A OUTPUT ! -s $ELSEWHERE -p tcp --dport 1001:1004 -j DNAT --to-destination $ADDRA",
	), want: []want{reaches("tcp 1001", "$ADDRA port 1001")}}}},
	{"output rule that leaves out own sources", iptables, []step{{
		load: "-A OUTPUT ! -s $NET -p tcp --dport 1001 -j DNAT --to-destination $A",
		want: []want{{at: "tcp 1001", says: listed}},
	}}},
	{"target at one address caught in output", iptables, []step{
		{load: lines("-A PREROUTING -p tcp --dport 1001 -j DNAT --to-destination $A"), want: []want{reaches("tcp 1001", serverA)}},
		{load: lines("-A OUTPUT -d $ADDRA -p tcp --dport 80 -j DNAT --to-destination $B"),
			want: []want{{at: "tcp 1001", outside: []string{serverA}, says: uncertain}}},
		{load: lines("-D OUTPUT -d $ADDRA -p tcp --dport 80 -j DNAT --to-destination $B"), want: []want{reaches("tcp 1001", serverA)}},
	}},
	{"target at one address caught by a chain", iptables, []step{{load: lines(
		":S - [0:0]",
		"-A PREROUTING -p tcp --dport 1001 -j DNAT --to-destination $A",
		"-A OUTPUT -d $ADDRA -j S", "-A S -p tcp -j DNAT --to-destination $B",
	), want: []want{{at: "tcp 1001", outside: []string{serverA}, says: uncertain}}}}},
	{"balanced server caught in output, and another rule", nil, []step{{load: table(
		pre("tcp dport 1001 dnat to numgen inc mod 2 map { 0 : $ADDRA, 1 : $ADDRA }", "tcp dport 1001 dnat to $ADDRB"),
		base("out", "output", -100, "ip daddr $ADDRA tcp dport 1001 dnat to $C"),
	), want: []want{{at: "tcp 1001", outside: []string{"$ADDRA port 1001"}, says: uncertain}}}}},
	{"some connections return in output", iptables, []step{{load: lines(
		"-A PREROUTING -p tcp --dport 1001 -j DNAT --to-destination $A",
		"-A OUTPUT -p tcp --dport 80 -m statistic --mode nth --every 2 --packet 0 -j RETURN",
		"-A OUTPUT -p tcp --dport 80 -j DNAT --to-destination $PORTA80",
	), want: []want{{at: "tcp 1001", outside: []string{serverA}, says: uncertain}}}}},
	{"another server in output", iptables, []step{{load: lines(
		"-A PREROUTING -p tcp --dport 1001 -j DNAT --to-destination $A",
		"-A OUTPUT -p tcp --dport 1001 -j DNAT --to-destination $B",
	), want: []want{reaches("tcp 1001", serverA)}}}},
	{"another server in output, and not understood", iptables, []step{{load: lines(
		"-A PREROUTING -p tcp --dport 1001 -m length --length 0:65535 -j DNAT --to-destination $A",
		"-A PREROUTING -p tcp --dport 1002:1102 -j DNAT --to-destination $A", // more ports than configured
		"-A OUTPUT -p tcp --dport 1001:1002 -j DNAT --to-destination $B",
	), want: []want{{at: "tcp 1001", outside: []string{serverA}, says: uncertain}, {at: "tcp 1002", outside: []string{serverA}, says: uncertain}}}}},
	{"across the loopback", iptables, []step{{load: lines(
		"-A PREROUTING -p tcp --dport 1001 -j DNAT --to-destination $LOOP7000",
		"-A OUTPUT -d $LOOPBACK -p tcp --dport 1002 -j DNAT --to-destination $A",
	), want: []want{{at: "tcp 1001", says: uncertain}, {at: "tcp 1002", says: uncertain}}}}},
	{"redirect", iptables, []step{{load: lines(
		"-A PREROUTING -p tcp --dport 1001 -j REDIRECT --to-ports 7000",
		"-A PREROUTING -p tcp --dport 1002 -j REDIRECT --to-ports 7001",
		"-A PREROUTING -p tcp --dport 1003 -j REDIRECT --to-ports 7002",
		"-A PREROUTING -p udp --dport 1003 -j REDIRECT --to-ports 7002",
	), want: []want{reaches("tcp 1001", everywhere), {at: "tcp 1002", says: published}, reaches("tcp 1003", atNode), reaches("udp 1003", atNode)}}}},
	{"port ranges", iptables, []step{{load: lines(
		"-A PREROUTING -p tcp --dport 1001:1006 -j DNAT --to-destination $PORTA9000-9002/1001",
		"-A PREROUTING -p tcp --dport 1007 -j DNAT --to-destination $PORTA9000-9002 --random",
	), want: []want{reaches("tcp 1001", "$ADDRA port 9000"), reaches("tcp 1005", "$ADDRA port 9001"), reaches("tcp 1006", "$ADDRA port 9002"),
		reaches("tcp 1007", "$ADDRA port 9000", "$ADDRA port 9001", "$ADDRA port 9002")}}}},
}

// TestMeaning loads rulesets whose meaning is easily mistaken, and compares what is
// published with what connections meet.
func TestMeaning(t *testing.T) {
	binary, err := program.Path(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	for _, family := range []string{"IPv4", "IPv6"} {
		t.Run(family, func(t *testing.T) {
			t.Parallel()
			o := &oracle{world: newWorld(t, families[family], binary), found: map[string]int{}}
			for _, m := range meanings {
				if len(m.tools) == 0 {
					m.tools = []string{"nft"}
				}
				for _, tool := range m.tools {
					if strings.Contains(tool, "6") == o.v6 {
						t.Run(m.name+"/"+tool, func(t *testing.T) { o.in(t, func() { o.means(m, tool) }) })
					}
				}
			}
			t.Run("interfaces of default routes", func(t *testing.T) { o.in(t, o.uplinks) })
			t.Run("objects are no loss", func(t *testing.T) { o.in(t, o.objects) })
		})
	}
}

// in has f fail t.
func (o *oracle) in(t *testing.T, f func()) {
	was := o.t
	o.t = t
	defer func() { o.t = was }()
	f()
}

// means loads the steps of a ruleset in turn, and checks each.
func (o *oracle) means(m meaning, tool string) {
	defer o.clear()
	for i, s := range m.steps {
		with := cmp.Or(s.with, tool)
		o.load(with, s.load)
		o.mark(with)
		for _, w := range s.want {
			if wrong := o.wrong(w); wrong != "" {
				o.t.Errorf("step %d: %s: %s", i, w.at, wrong)
			}
		}
	}
}

// fill puts the addresses of the world into a text.
func (o *oracle) fill(text string) string {
	elsewhere := "10.0.0.0/8"
	if o.v6 {
		elsewhere = "fd10::/16"
	}
	r := []string{"$FAMILY", o.name, "$NET", o.uplink, "$NODE", o.nodes[0], "$OTHERNODE", o.nodes[1], "$LOOPBACK", o.loopback, "$ELSEWHERE", elsewhere, "$NEIGHBOUR", o.neighbour}
	g := &grammar{f: o.family}
	r = append(r, "$LOOP7000", g.at(o.loopback, "7000"))
	names := []string{"A", "B", "C"}
	for i, name := range names {
		r = append(r, "$ADDR"+name, o.servers[i], "$PORT"+name, g.at(o.servers[i], ""))
	}
	for i, name := range names {
		r = append(r, "$"+name, g.at(o.servers[i], "80"))
	}
	return strings.NewReplacer(r...).Replace(text)
}

// load writes rules with a tool.
func (o *oracle) load(tool, text string) {
	o.t.Helper()
	command := []string{"nft", "-f", "-"}
	if strings.HasPrefix(tool, "ip") { // not nft
		command = []string{tool + "-restore", "-w", "--noflush"}
		text = "*nat\n" + text + "\nCOMMIT\n"
	}
	text = o.fill(text)
	if out, err := o.try(o.guest, text, command...); err != nil {
		o.t.Fatalf("%q: %v\n%s\n%s", command, err, out, text)
	}
}

// mark waits until what a tool wrote has been followed.
func (o *oracle) mark(tool string) {
	o.t.Helper()
	p := o.nextMarker()
	if strings.HasSuffix(tool, "-legacy") {
		o.load(tool, fmt.Sprintf("-I PREROUTING -p tcp --dport %d -j DNAT --to-destination $A", p))
	} else {
		o.markNFT(p)
	}
	o.seen()
}

// clear removes all rules and waits until that has been followed.
func (o *oracle) clear() {
	o.t.Helper()
	o.reset(tool{ipt: "legacy"})
	if err := o.await(o.marker(), false); err != nil {
		o.t.Fatal(err)
	}
}

// wrong says what is not as wanted about a port, "" if all is. A busy machine
// answers late, so it looks again before it says so.
func (o *oracle) wrong(w want) (wrong string) {
	begin := time.Now()
	for look := 0; ; look++ {
		if wrong = o.wrongNow(w, patience(look)); wrong == "" || time.Since(begin) > settled {
			return wrong
		}
		time.Sleep(100 * time.Millisecond)
	}
}

func (o *oracle) wrongNow(w want, patience time.Duration) string {
	protocol, number, _ := strings.Cut(w.at, " ")
	n, _ := strconv.ParseUint(number, 10, 16)
	s := newSlot(port.TCP, uint16(n))
	if protocol == "udp" {
		s.protocol = port.UDP
	}
	o.probe(s, patience)
	o.list([]*slot{s})
	open := slices.ContainsFunc(s.pubs, func(p status.Publication) bool { return p.State == port.Active })
	conflict := slices.ContainsFunc(s.pubs, func(p status.Publication) bool { return p.State == port.Conflict }) &&
		slices.Equal(s.outside[o.nodes[0]], s.outside[o.nodes[1]]) // else they are two servers
	found := fmt.Sprintf("outside %v, local %v, host %q, publications %s", s.outside, s.local, s.host, describe(s.pubs))
	outside := ""
	if servers := s.outside[o.nodes[0]]; len(servers) > 0 {
		outside = servers[0]
	}
	if !o.among(outside, w.outside) {
		return fmt.Sprintf("want %q outside: %s", w.outside, found)
	}
	switch w.says {
	case usual:
		if open != (len(w.outside) > 0) || conflict {
			return "publication: " + found
		}
	case published:
		if !open {
			return "not published: " + found
		}
	case listed:
		if open || o.named(missed, s, o.explain(s)) == "" {
			return "published, or not explained: " + found
		}
		return ""
	case partly:
		if !open || !slices.ContainsFunc(s.pubs, func(p status.Publication) bool {
			return p.State != port.Active && strings.Contains(p.Reason, "not understood")
		}) {
			return "not published and withheld: " + found
		}
		return ""
	case uncertain:
		if o.named(silent, s, o.explain(s)) != byDoubt {
			return "not said to be uncertain: " + found
		}
		return ""
	}
	if !o.among(s.host, w.outside) {
		return fmt.Sprintf("want %q for the host: %s", w.outside, found)
	}
	return ""
}

// among reports whether a server is one of those that are wanted, or none if none is.
func (o *oracle) among(server string, wanted []string) bool {
	if server == "" {
		return len(wanted) == 0
	}
	return slices.ContainsFunc(wanted, func(w string) bool { return o.fill(w) == server })
}

// uplinks checks which interfaces clients outside come in by, wherever the default route is.
func (o *oracle) uplinks() {
	defer o.lead(defaults[0])
	defer o.clear()
	o.load("nft", table(pre(`iifname "eth0" tcp dport 1001 dnat to $A`, `iifname "docker0" tcp dport 1002 dnat to $A`, `iifname != "docker0" tcp dport 1003 dnat to $A`)))
	o.mark("nft")
	for _, way := range defaults {
		o.lead(way)
		for _, w := range []want{reaches("tcp 1001", serverA), closed("tcp 1002"), reaches("tcp 1003", serverA)} {
			if wrong := o.wrong(w); wrong != "" {
				o.t.Errorf("%s: %s: %s", way, w.at, wrong)
			}
		}
	}
}

// objects checks that commits of named objects are followed without a dump.
func (o *oracle) objects() {
	defer o.clear()
	o.load("nft", table(pre("tcp dport 1001 dnat to $A")))
	o.mark("nft")
	losses := o.metric("fairlead_nat_losses_total")
	for i := range 5 {
		o.load("nft", fmt.Sprintf("table $FAMILY t { counter c%[1]d { }; quota q%[1]d { over 1 mbytes; }; limit l%[1]d { rate 1/second; }; }", i))
		o.load("nft", fmt.Sprintf("table inet noise { counter c%d { }; }", i))
		o.load("nft", fmt.Sprintf("delete counter $FAMILY t c%d", i))
	}
	o.mark("nft")
	if got := o.metric("fairlead_nat_losses_total"); got != losses {
		o.t.Errorf("%s losses, was %s", got, losses)
	}
	if wrong := o.wrong(reaches("tcp 1001", serverA)); wrong != "" {
		o.t.Error(wrong)
	}
}

// metric returns a value that the agent exports.
func (o *oracle) metric(name string) string {
	o.t.Helper()
	c, err := o.guest.Dial("tcp", metricsAddr)
	if err != nil {
		o.t.Fatal(err)
	}
	defer c.Close()
	_, _ = io.WriteString(c, "GET /metrics HTTP/1.0\r\n\r\n")
	b, err := io.ReadAll(c)
	if err != nil {
		o.t.Fatal(err)
	}
	_, after, ok := strings.Cut(string(b), "\n"+name+" ")
	if !ok {
		o.t.Fatalf("no %s among the metrics", name)
	}
	value, _, _ := strings.Cut(after, "\n")
	return value
}
