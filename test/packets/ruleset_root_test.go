// SPDX-License-Identifier: Apache-2.0

//go:build linux && root

package packets

import (
	"fmt"
	"math/rand/v2"
	"strings"
)

// tool is a way to write rules.
type tool struct {
	name string
	nft  []string // tables as "FAMILY NAME"
	ipt  string   // "nft" or "legacy": the back end of iptables
}

var tools = []tool{
	{name: "nft", nft: []string{"FAMILY a"}},
	{name: "nft-inet", nft: []string{"inet a"}},
	{name: "nft-two-tables", nft: []string{"FAMILY a", "FAMILY b"}},
	{name: "iptables-nft", ipt: "nft"},
	{name: "iptables-legacy", ipt: "legacy"},
	{name: "nft-and-iptables-nft", nft: []string{"FAMILY a"}, ipt: "nft"},
	{name: "nft-and-iptables-legacy", nft: []string{"FAMILY a"}, ipt: "legacy"},
}

// grammar makes random rules, as a generator of random numbers says.
type grammar struct {
	r      *rand.Rand
	f      family
	second bool // also makes what is in second_root_test.go
}

func (g *grammar) one(n int) bool { return g.r.IntN(n) == 0 }

func oneOf(r *rand.Rand, list ...string) string { return list[r.IntN(len(list))] }

func (g *grammar) port() int { return firstPort + g.r.IntN(lastPort-firstPort+1) }

func (g *grammar) server() string { return g.f.servers[g.r.IntN(len(g.f.servers))] }

// at joins an address and a port, or a range of ports, as rules write it.
func (g *grammar) at(address, port string) string {
	if g.f.v6 {
		address = "[" + address + "]"
	}
	return address + ":" + port
}

func (g *grammar) serverPort() string { return oneOf(g.r, "80", "81", "80", "81", "9000-9002") }

func (g *grammar) redirectPort() string { return oneOf(g.r, "7000", "7000", "7001", "7002") }

// ---- nft ----

// own is an own address of the guest, or a network of such.
func (g *grammar) own() string {
	return oneOf(g.r, g.f.nodes[0], g.f.nodes[1], g.f.nodes[0], g.f.nodes[1], g.f.more)
}

// toServer reports whether a rule of the output hook is to be about connections to
// a server instead of an own port.
func (g *grammar) toServer(hook string) bool { return strings.EqualFold(hook, "output") && g.one(3) }

// nftMatch is what a rule of nft asks for.
func (g *grammar) nftMatch(hook string) string {
	var m []string
	ip := g.f.name
	if g.toServer(hook) {
		return fmt.Sprintf("%s daddr %s tcp dport %s", ip, oneOf(g.r, g.server(), g.server(), "{ "+g.f.servers[0]+", "+g.f.servers[1]+" }"),
			oneOf(g.r, "80", "81", "9000-9002", "1-65535"))
	}
	for limit := 4; g.one(limit) && len(m) < 2; limit = 3 {
		switch g.r.IntN(11) {
		case 0:
			m = append(m, ip+" saddr "+g.source())
		case 1:
			m = append(m, ip+" saddr != "+g.source())
		case 2:
			m = append(m, ip+" daddr "+g.own())
		case 3:
			m = append(m, ip+" daddr != "+g.own())
		case 4:
			m = append(m, ip+" daddr != "+g.f.uplink)
		case 5:
			m = append(m, ip+" daddr "+g.f.loopback)
		case 6:
			m = append(m, "fib daddr type "+oneOf(g.r, "local", "local", "!= local", "unicast", "!= unicast", "{ local, broadcast }"))
		case 9:
			m = append(m, "fib saddr type "+oneOf(g.r, "local", "!= local", "unicast", "!= unicast", "broadcast", "{ local, unicast }"))
		case 10:
			m = append(m, ip+" saddr "+g.f.nodes[0])
		case 7:
			if strings.Contains(strings.Join(m, " "), "ifname") {
				continue
			}
			if hook == "prerouting" {
				m = append(m, "iifname "+oneOf(g.r, `"eth0"`, `"docker0"`, `!= "docker0"`, `"lo"`, `"eth*"`))
			} else {
				m = append(m, "oifname "+oneOf(g.r, `"lo"`, `!= "lo"`))
			}
		case 8:
			m = append(m, "ct state new")
		}
	}
	if g.second && g.one(2) {
		m = append(m, g.condition(hook))
	}
	switch g.r.IntN(8) {
	case 0:
		m = append(m, fmt.Sprintf("tcp dport { %d, %d }", g.port(), g.port()))
	case 1:
		p := g.port()
		m = append(m, fmt.Sprintf("tcp dport %d-%d", p, p+g.r.IntN(4)))
	case 2:
		m = append(m, fmt.Sprintf("udp dport %d", g.port()))
	case 3:
		m = append(m, fmt.Sprintf("meta l4proto { tcp, udp } th dport %d", g.port()))
	default:
		m = append(m, fmt.Sprintf("tcp dport %d", g.port()))
	}
	return strings.Join(m, " ")
}

// source is a network of clients, or one client. The stranger is never named.
func (g *grammar) source() string {
	if g.one(2) {
		return oneOf(g.r, g.f.neighbour, g.f.neighbour, g.f.near, g.f.uplink)
	}
	return g.foreign()
}

// foreign is a network that no client is in.
func (g *grammar) foreign() string {
	if g.f.v6 {
		return oneOf(g.r, "fd10::/16", "2001:db8:1::/48")
	}
	return oneOf(g.r, "10.0.0.0/8", "198.51.100.0/24")
}

func (g *grammar) nftRule(hook string) string {
	m := g.nftMatch(hook)
	ip := "ip"
	if g.f.v6 {
		ip = "ip6"
	}
	if g.second && g.one(3) {
		return g.end(m, ip)
	}
	switch g.r.IntN(14) {
	case 0:
		return m + " return"
	case 1:
		return m + " accept"
	case 2:
		return m + " drop"
	case 3:
		return m + oneOf(g.r, " jump c0", " jump c1", " goto c0", " goto c1")
	case 4:
		return oneOf(g.r, "jump c0", "jump c1", "meta l4proto tcp jump c0", "meta l4proto tcp goto c1")
	case 5:
		return m + " redirect to :" + g.redirectPort()
	case 6:
		return m + " dnat " + ip + " to " + g.server()
	case 7:
		return fmt.Sprintf("dnat %s to tcp dport map { %d : %s, %d : %s }", ip, firstPort+g.r.IntN(5), g.server(), firstPort+5+g.r.IntN(5), g.server())
	case 8:
		return fmt.Sprintf("tcp dport vmap { %d : %s, %d : %s }", firstPort+g.r.IntN(5), oneOf(g.r, "jump c0", "goto c1", "accept", "return"),
			firstPort+5+g.r.IntN(5), oneOf(g.r, "jump c1", "goto c0", "drop"))
	case 9:
		if g.one(3) {
			return m + fmt.Sprintf(" dnat %s to numgen inc mod 2 map { 0 : %s, 1 : %s }", ip, g.server(), g.server())
		}
	case 10:
		if g.one(3) {
			return m + " meta mark set 1"
		}
	case 11:
		if g.one(3) {
			return "meta mark " + oneOf(g.r, "0", "1") + " " + m + " return"
		}
	}
	return m + " dnat " + ip + " to " + g.at(g.server(), g.serverPort())
}

// nftRules are rules of a chain; those of c1 jump nowhere.
func (g *grammar) nftRules(chain, hook string, most int) (out []string) {
	for range 1 + g.r.IntN(most) {
		rule := g.nftRule(hook)
		if chain == "c1" && (strings.Contains(rule, "jump") || strings.Contains(rule, "goto") || strings.Contains(rule, "vmap @")) ||
			chain == "c0" && (strings.Contains(rule, " c0") || strings.Contains(rule, "vmap")) {
			continue
		}
		out = append(out, rule)
	}
	return out
}

// nftTable writes a table anew, in one commit with what was before.
func (g *grammar) nftTable(table string, mixed bool) string {
	var b strings.Builder
	fmt.Fprintf(&b, "table %[1]s\ndelete table %[1]s\ntable %[1]s {\n", table)
	chain := func(name, base, hook string, most int) {
		fmt.Fprintf(&b, "\tchain %s {\n", name)
		if base != "" {
			fmt.Fprintf(&b, "\t\t%s\n", base)
		}
		for _, r := range g.nftRules(name, hook, most) {
			fmt.Fprintf(&b, "\t\t%s\n", r)
		}
		b.WriteString("\t}\n")
	}
	if g.second {
		b.WriteString(g.objects())
	}
	chain("c1", "", "prerouting", 3)
	chain("c0", "", "prerouting", 3)
	policy := ""
	if !mixed && (g.one(20) || g.second && g.one(6)) {
		policy = " policy drop;"
	}
	chain("pre", fmt.Sprintf("type nat hook prerouting priority %d;%s", []int{-100, -100, -110, -90}[g.r.IntN(4)], policy), "prerouting", 5)
	if g.one(3) {
		chain("out", "type nat hook output priority -100;", "output", 4)
	}
	if g.one(6) { // its marks are met before
		fmt.Fprintf(&b, "\tchain marks {\n\t\ttype filter hook prerouting priority -150;\n\t\ttcp dport %d meta mark set 1\n\t}\n", g.port())
	}
	if g.one(6) {
		chain("pre2", fmt.Sprintf("type nat hook prerouting priority %d;", []int{-120, -100, -80}[g.r.IntN(3)]), "prerouting", 3)
	}
	b.WriteString("}\n")
	return b.String()
}

const nextCommit = "# next commit\n"

// nftMutation changes a table a little, in one commit or several.
func (g *grammar) nftMutation(table string) string {
	if g.second && g.one(2) {
		return g.nftChange(table)
	}
	chain, hook := "pre", "prerouting"
	switch g.r.IntN(4) {
	case 0:
		chain = "c0"
	case 1:
		chain = "c1"
	}
	rules := g.nftRules(chain, hook, 2)
	if len(rules) == 0 {
		rules = []string{fmt.Sprintf("tcp dport %d return", g.port())}
	}
	switch g.r.IntN(8) {
	case 5: // registered anew, so before others of its priority
		var b strings.Builder
		fmt.Fprintf(&b, "flush chain %[1]s pre\ndelete chain %[1]s pre\nadd chain %[1]s pre { type nat hook prerouting priority %[2]d; }\n", table,
			[]int{-100, -100, -110, -90}[g.r.IntN(4)])
		for _, r := range rules {
			fmt.Fprintf(&b, "add rule %s pre %s\n", table, r)
		}
		return b.String()
	case 6: // all its chains are registered anew
		return fmt.Sprintf("add table %[1]s { flags dormant; }\n"+nextCommit+"add table %[1]s\n", table)
	case 0:
		return fmt.Sprintf("insert rule %s %s %s\n", table, chain, rules[0])
	case 1:
		var b strings.Builder
		fmt.Fprintf(&b, "flush chain %s %s\n", table, chain)
		for _, r := range rules {
			fmt.Fprintf(&b, "add rule %s %s %s\n", table, chain, r)
		}
		return b.String()
	case 2:
		return g.nftTable(table, true)
	}
	return fmt.Sprintf("add rule %s %s %s\n", table, chain, rules[0])
}

// ---- iptables ----

func (g *grammar) iptMatch(hook string) string {
	var m []string
	if g.toServer(hook) {
		return fmt.Sprintf("-d %s -p tcp%s", g.server(), oneOf(g.r, " --dport 80", " --dport 81", " --dport 9000:9002", ""))
	}
	used := map[int]bool{} // iptables takes each once
	for limit := 4; g.one(limit) && len(m) < 2; limit = 3 {
		kind := g.r.IntN(9)
		group := map[int]int{1: 0, 3: 2, 4: 2, 5: 2}
		if first, ok := group[kind]; used[kind] || ok && used[first] {
			continue
		} else if ok {
			used[first] = true
		}
		used[kind] = true
		switch kind {
		case 0:
			m = append(m, "-s "+g.source())
		case 1:
			m = append(m, "! -s "+g.source())
		case 2:
			m = append(m, "-d "+g.own())
		case 3:
			m = append(m, "! -d "+g.own())
		case 4:
			m = append(m, "! -d "+g.f.uplink)
		case 5:
			m = append(m, "-d "+g.f.loopback)
		case 6:
			m = append(m, "-m addrtype "+oneOf(g.r, "--dst-type LOCAL", "--dst-type LOCAL", "! --dst-type LOCAL", "--dst-type UNICAST",
				"! --dst-type UNICAST", "--dst-type LOCAL,UNICAST"))
		case 8:
			m = append(m, "-m addrtype "+oneOf(g.r, "--src-type LOCAL", "! --src-type LOCAL", "--src-type UNICAST", "! --src-type UNICAST",
				"--src-type LOCAL,UNICAST"))
		case 7:
			if hook == "PREROUTING" {
				m = append(m, oneOf(g.r, "-i eth0", "-i docker0", "! -i docker0", "-i lo", "-i eth+"))
			} else {
				m = append(m, oneOf(g.r, "-o lo", "! -o lo"))
			}
		}
	}
	if g.second && g.one(2) {
		m = append(m, g.iptCondition(hook))
	}
	switch g.r.IntN(7) {
	case 0:
		m = append(m, fmt.Sprintf("-p tcp -m multiport --dports %d,%d", g.port(), g.port()))
	case 1:
		p := g.port()
		m = append(m, fmt.Sprintf("-p tcp --dport %d:%d", p, p+g.r.IntN(4)))
	case 2:
		m = append(m, fmt.Sprintf("-p udp --dport %d", g.port()))
	default:
		m = append(m, fmt.Sprintf("-p tcp --dport %d", g.port()))
	}
	return strings.Join(m, " ")
}

func (g *grammar) iptRule(hook string) string {
	m := g.iptMatch(hook)
	if g.second && g.one(3) {
		return m + g.iptEnd()
	}
	switch g.r.IntN(13) {
	case 0:
		return m + " -j RETURN"
	case 1:
		return m + " -j ACCEPT"
	case 2:
		return m + oneOf(g.r, " -j C0", " -j C1", " -g C0", " -g C1")
	case 3:
		return oneOf(g.r, "-j C0", "-j C1", "-p tcp -j C0", "-p tcp -g C1")
	case 4:
		return m + " -j REDIRECT --to-ports " + g.redirectPort()
	case 5:
		return m + " -j DNAT --to-destination " + g.server()
	case 6:
		if g.one(3) {
			return m + " -j DNAT --to-destination " + g.at(g.server(), "9000-9002") + " --random"
		}
	case 7:
		if g.one(3) {
			return m + " --syn -j DNAT --to-destination " + g.at(g.server(), "80")
		}
	case 8:
		if g.one(3) {
			return m + " -m statistic --mode nth --every 2 --packet 0 -j DNAT --to-destination " + g.at(g.server(), "80")
		}
	}
	return m + " -j DNAT --to-destination " + g.at(g.server(), g.serverPort())
}

func (g *grammar) iptRules(chain, hook string, most int) (out []string) {
	for range 1 + g.r.IntN(most) {
		rule := g.iptRule(hook)
		if strings.Contains(rule, "--syn") && !strings.Contains(rule, "-p tcp") {
			continue
		}
		if chain == "C1" && (strings.Contains(rule, " C0") || strings.Contains(rule, " C1")) || chain == "C0" && strings.Contains(rule, " C0") {
			continue
		}
		out = append(out, "-A "+chain+" "+rule)
	}
	return out
}

// iptTable is the nat table for iptables-restore, with a chain of its own for
// the marker of a step, which comes first.
func (g *grammar) iptTable(marker string) string {
	lines := []string{"*nat", ":PREROUTING ACCEPT [0:0]", ":OUTPUT ACCEPT [0:0]", ":POSTROUTING ACCEPT [0:0]",
		":MARKER - [0:0]", ":C0 - [0:0]", ":C1 - [0:0]", "-A PREROUTING -j MARKER", marker}
	lines = append(lines, g.iptRules("C1", "PREROUTING", 3)...)
	lines = append(lines, g.iptRules("C0", "PREROUTING", 3)...)
	lines = append(lines, g.iptRules("PREROUTING", "PREROUTING", 5)...)
	if g.one(3) {
		lines = append(lines, g.iptRules("OUTPUT", "OUTPUT", 4)...)
	}
	return strings.Join(append(lines, "COMMIT", ""), "\n")
}

// iptMutation changes the table a little, for iptables-restore --noflush.
func (g *grammar) iptMutation(marker string) string {
	lines := []string{"*nat", "-F MARKER", marker}
	chain := oneOf(g.r, "PREROUTING", "PREROUTING", "C0", "C1")
	rules := g.iptRules(chain, "PREROUTING", 2)
	switch {
	case g.one(4) && chain != "PREROUTING":
		lines = append(lines, "-F "+chain)
		lines = append(lines, rules...)
	case g.one(3) && len(rules) > 0 && chain != "PREROUTING":
		lines = append(lines, strings.Replace(rules[0], "-A "+chain, "-I "+chain, 1))
	default:
		lines = append(lines, rules...)
	}
	return strings.Join(append(lines, "COMMIT", ""), "\n")
}
