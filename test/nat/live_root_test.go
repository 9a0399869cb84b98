// SPDX-License-Identifier: Apache-2.0

//go:build linux && (root || vm)

package nat

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/fairlead/fairlead/internal/guest/source/nat"
	"github.com/fairlead/fairlead/internal/testkit/rounds"
)

// expect waits until the feed states exactly these lines.
func expect(t testing.TB, f *feed, step string, want ...string) {
	t.Helper()
	var got []string
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(time.Millisecond) {
		if got = f.lines(); cmp.Equal(append([]string{}, want...), append([]string{}, got...)) {
			return
		}
	}
	t.Fatalf("%s (-want +got):\n%s", step, cmp.Diff(want, got))
}

// expectAll is expect on each method.
func expectAll(t testing.TB, all []running, step string, want ...string) {
	t.Helper()
	for _, x := range all {
		expect(t, x.feed, step+" on "+x.method, want...)
	}
}

const pre = "add table ip t\nadd chain ip t pre { type nat hook prerouting priority -100; }\n"

func TestLiveNftables(t *testing.T) {
	w := newWorld(t)
	all := w.startMethods(nat.Options{})
	nft := func(s string) { t.Helper(); w.run(s, "nft", "-f", "-") }
	const a, b, c = "tcp 0.0.0.0:80 [ip t] 10.0.0.1:80", "tcp 0.0.0.0:81 [ip t] 10.0.0.2:81", "tcp 0.0.0.0:82 [ip t] 10.0.0.3:82"

	nft(pre)
	nft("add rule ip t pre tcp dport 80 dnat to 10.0.0.1")
	expectAll(t, all, "add rule", a)
	nft("insert rule ip t pre tcp dport 81 dnat to 10.0.0.2")
	expectAll(t, all, "insert rule", a, b)

	// A rule that is replaced keeps its place.
	handle := func(text string) string {
		for line := range strings.Lines(w.run("", "nft", "-a", "list", "ruleset")) {
			if strings.Contains(line, text) {
				_, h, _ := strings.Cut(line, "# handle ")
				return strings.TrimSpace(h)
			}
		}
		t.Fatalf("no rule %q", text)
		return ""
	}
	nft("replace rule ip t pre handle " + handle("dport 81") + " tcp dport 82 dnat to 10.0.0.3")
	expectAll(t, all, "replace rule", a, c)
	nft("add rule ip t pre position " + handle("dport 82") + " tcp dport 81 dnat to 10.0.0.2")
	expectAll(t, all, "rule in the middle", a, b, c)
	nft("delete rule ip t pre handle " + handle("dport 82"))
	expectAll(t, all, "delete rule", a, b)

	// An aborted batch changes nothing.
	if out, err := try("flush ruleset\n"+pre+"add rule ip t nowhere accept\n", "ip", "netns", "exec", w.name, "nft", "-f", "-"); err == nil {
		t.Fatalf("the batch was not refused: %s", out)
	}
	nft("add rule ip t pre tcp dport 82 dnat to 10.0.0.3")
	expectAll(t, all, "after an abort", a, b, c)

	// Elements of sets and maps.
	nft(`flush chain ip t pre
add map ip t m { type inet_service : ipv4_addr; elements = { 80 : 10.0.0.1 }; }
add set ip t s { type inet_service; flags interval; elements = { 100-102 }; }
add rule ip t pre dnat to tcp dport map @m
add rule ip t pre tcp dport @s dnat to 10.0.0.9:1`)
	s100 := []string{"tcp 0.0.0.0:100 [ip t] 10.0.0.9:1", "tcp 0.0.0.0:101 [ip t] 10.0.0.9:1", "tcp 0.0.0.0:102 [ip t] 10.0.0.9:1"}
	expectAll(t, all, "map and set", append(s100[:3:3], a)...)
	nft("add element ip t m { 81 : 10.0.0.2 }")
	expectAll(t, all, "add element", append(s100[:3:3], a, b)...)
	nft("delete element ip t s { 100-102 }; delete element ip t m { 80 }; add element ip t s { 101 }")
	expectAll(t, all, "delete elements", "tcp 0.0.0.0:101 [ip t] 10.0.0.9:1", b)
	nft("flush set ip t s; flush map ip t m; add element ip t m { 82 : 10.0.0.3 }")
	expectAll(t, all, "flush set", c)

	// What no hook reaches, and what another namespace has, is nothing.
	nft("add chain ip t alone\nadd rule ip t alone tcp dport 90 dnat to 10.0.0.1")
	other := newWorld(t)
	other.run(pre+"add rule ip t pre tcp dport 91 dnat to 10.0.0.1", "nft", "-f", "-")
	nft("add rule ip t pre tcp dport 80 dnat to 10.0.0.1")
	expectAll(t, all, "unreached", a, c)
	nft("add rule ip t pre jump alone")
	expectAll(t, all, "reached", a, c, "tcp 0.0.0.0:90 [ip t] 10.0.0.1:90")

	// A table may sleep, be renamed by deletion, and be first seen through another.
	nft("add table ip t { flags dormant; }")
	expectAll(t, all, "dormant")
	nft("add table ip t")
	nft("delete table ip t")
	nft("add table ip u\nadd chain ip u f { type filter hook input priority 0; }\nadd chain ip u svc\nadd rule ip u svc tcp dport 95 dnat to 10.0.0.1\nadd set ip u z { type inet_service; }\nadd element ip u z { 96 }")
	nft("add chain ip u pre { type nat hook prerouting priority -100; }\nadd rule ip u pre jump svc\nadd rule ip u pre tcp dport @z dnat to 10.0.0.1")
	expectAll(t, all, "a filter table that gets a nat chain", "tcp 0.0.0.0:95 [ip u] 10.0.0.1:95", "tcp 0.0.0.0:96 [ip u] 10.0.0.1:96")
	nft("flush ruleset")
	expectAll(t, all, "flush ruleset")
	for _, x := range all {
		// A machine that stalls may have a commit read again.
		if st := x.src.Status(); st.Drift != 0 || st.Lost > 10 {
			t.Errorf("%s: drift %d, lost %d", x.method, st.Drift, st.Lost)
		}
	}
}

// A table that is there before the source starts may get its first nat chain at a hook
// that matters later: by itself, with rules, or again after it was deleted.
func TestFirstNATChainOfKnownTable(t *testing.T) {
	w := newWorld(t)
	nft := func(s string) { t.Helper(); w.run(s, "nft", "-f", "-") }
	const post = "chain post { type nat hook postrouting priority 100; }; "
	nft("table ip nat { " + post + "}\ntable ip one { " + post + "}\ntable ip again { " + post + "chain pre { type nat hook prerouting priority -90; }; }")
	all := w.startMethods(nat.Options{})
	const a, b, c = "tcp 0.0.0.0:80 [ip nat] 10.0.0.1:80", "tcp 0.0.0.0:81 [ip one] 10.0.0.1:81", "tcp 0.0.0.0:82 [ip again] 10.0.0.1:82"
	nft("add chain ip nat pre { type nat hook prerouting priority -100; }")
	nft("add rule ip nat pre tcp dport 80 dnat to 10.0.0.1")
	expectAll(t, all, "chain, then rule", a)
	nft("add chain ip one pre { type nat hook prerouting priority -100; }\nadd rule ip one pre tcp dport 81 dnat to 10.0.0.1")
	expectAll(t, all, "chain and rule", a, b)
	nft("delete chain ip again pre")
	nft("add chain ip again pre { type nat hook prerouting priority -90; }")
	nft("add rule ip again pre tcp dport 82 dnat to 10.0.0.1")
	expectAll(t, all, "deleted and added again", a, b, c)
}

func TestLiveIptables(t *testing.T) {
	w := newWorld(t)
	all := w.startMethods(nat.Options{})
	for _, tool := range []string{"iptables-nft", "ip6tables-nft", "iptables-legacy", "ip6tables-legacy"} {
		table, any, to := "ip nat", "0.0.0.0", "10.0.0.1"
		if strings.HasPrefix(tool, "ip6") {
			table, any, to = "ip6 nat", "[::]", "[fd00::1]"
		}
		if strings.HasSuffix(tool, "legacy") {
			table = "legacy " + table
		}
		line := func(port int) string { return fmt.Sprintf("tcp %s:%d [%s] %s:%d", any, port, table, to, port) }
		rule := func(op string, port int) {
			t.Helper()
			w.run("", tool, "-w", "-t", "nat", op, "PREROUTING", "-p", "tcp", "--dport", fmt.Sprint(port), "-j", "DNAT", "--to-destination", to)
		}
		rule("-A", 80)
		expectAll(t, all, tool+" append", line(80))
		rule("-I", 81)
		expectAll(t, all, tool+" insert", line(80), line(81))
		w.run("", tool, "-w", "-t", "nat", "-R", "PREROUTING", "1", "-p", "tcp", "--dport", "82", "-j", "DNAT", "--to-destination", to)
		expectAll(t, all, tool+" replace", line(80), line(82))
		rule("-D", 80)
		expectAll(t, all, tool+" delete", line(82))
		w.run("", tool, "-w", "-t", "nat", "-N", "X")
		w.run("", tool, "-w", "-t", "nat", "-A", "X", "-p", "tcp", "--dport", "83", "-j", "DNAT", "--to-destination", to)
		w.run("", tool, "-w", "-t", "nat", "-A", "PREROUTING", "-j", "X")
		expectAll(t, all, tool+" chain", line(82), line(83))
		w.run("", tool, "-w", "-t", "nat", "-F")
		expectAll(t, all, tool+" flush")
	}
	for _, x := range all {
		if st := x.src.Status(); st.Drift != 0 {
			t.Errorf("%s: drift %d", x.method, st.Drift)
		}
	}
}

// refill is a table of n rules that is deleted and made anew in one commit.
func refill(n, gen int) string {
	var b strings.Builder
	b.WriteString("table ip big\ndelete table ip big\ntable ip big {\nchain svc {\n")
	for i := range n {
		fmt.Fprintf(&b, "tcp dport %d dnat to 10.1.%d.%d:80\n", 20000+i, i/250, i%250+1)
	}
	fmt.Fprintf(&b, "tcp dport %d dnat to 10.2.0.1:80\n", 10000+gen)
	b.WriteString("}\nchain pre { type nat hook prerouting priority -100; jump svc; }\n}\n")
	return b.String()
}

// A table of 10,000 rules that is emptied and refilled in one commit withdraws
// nothing of what stays, however often.
func TestRefillWithdrawsNothing(t *testing.T) {
	rules := rounds.Of(t, "FAIRLEAD_REFILL", 10_000)
	w := newWorld(t)
	all := w.startMethods(nat.Options{})
	for gen := range 6 {
		w.run(refill(rules, gen), "nft", "-f", "-")
		for _, x := range all {
			eventually(t, "all rules of the new table on "+x.method, func() bool {
				x.feed.mu.Lock()
				defer x.feed.mu.Unlock()
				_, ok := x.feed.set[fmt.Sprintf("ip big tcp 0.0.0.0:%d", 10000+gen)]
				return ok && len(x.feed.set) == rules+1
			})
		}
	}
	for _, x := range all {
		x.stop()
		for k, n := range x.feed.drops {
			if k.Port >= 20000 {
				t.Errorf("%s: %v was withdrawn %d times", x.method, k, n)
			}
		}
		if st := x.src.Status(); st.Drift != 0 {
			t.Errorf("%s: drift %d", x.method, st.Drift)
		}
	}
}
