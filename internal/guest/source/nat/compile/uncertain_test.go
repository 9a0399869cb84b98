// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/fairlead/fairlead/internal/guest/source/nat/ruleset"
	"github.com/fairlead/fairlead/internal/testkit/natrules"
)

// What is not understood is neither published as certain nor left out without a word.
func TestUncertain(t *testing.T) {
	join, verdict := natrules.Join, func(code int32, chain ...string) []byte { return natrules.Verdict(code, strings.Join(chain, "")) }
	rules := func(r ...[]byte) [][]byte { return r }
	target := func(name string) []byte {
		return natrules.Expr("target", ruleset.AppendAttr(nil, 1, append([]byte(name), 0)))
	}
	// in and notIn look the source up in a set with timeouts.
	source := natrules.Payload(1, 12, 4, 1)
	in := join(source, natrules.Lookup("timed", 1, -1))
	notIn := join(source, natrules.Expr("lookup", ruleset.AppendAttr(nil, 1, []byte("timed\x00")), natrules.Num(2, 1), natrules.Num(5, 1)))
	vmap := func(name string) []byte { return join(natrules.Payload(2, 2, 2, 1), natrules.Lookup(name, 1, 0)) }
	port80 := join(natrules.TCP(), natrules.Dport(80))
	a, b := join(port80, natrules.DNAT("10.0.0.1", 8080)), join(port80, natrules.DNAT("10.0.0.2", 8080))
	limit := natrules.Expr("limit")
	ct := func(key uint32, addr string) []byte {
		return join(natrules.Expr("ct", natrules.Num(1, 1), natrules.Num(2, key), ruleset.AppendAttr(nil, 3, []byte{0})), natrules.Cmp(ruleset.CmpEq, 1, netip.MustParseAddr(addr).AsSlice()))
	}
	// set writes two bytes of a header, of which it keeps some bits.
	set := func(base, off uint32, mask, xor string) []byte {
		return join(natrules.Payload(base, off, 2, 1),
			natrules.Expr("bitwise", natrules.Num(1, 1), natrules.Num(2, 1), natrules.Num(3, 2), natrules.Data(4, []byte(mask)), natrules.Data(5, []byte(xor))),
			natrules.Expr("payload", natrules.Num(5, 1), natrules.Num(2, base), natrules.Num(3, off), natrules.Num(4, 2)))
	}
	// write writes two bytes of a constant, at an offset of one header that is in the next.
	write := func(base, off uint32) []byte {
		return join(natrules.Immediate(1, []byte{0, 80}), natrules.Expr("payload", natrules.Num(5, 1), natrules.Num(2, base), natrules.Num(3, off), natrules.Num(4, 2)))
	}
	dscp, ttl, dport := set(1, 0, "\xff\x03", "\x00\x00"), set(1, 8, "\x00\xff", "\x40\x00"), set(2, 2, "\x00\x00", "\x00\x50")
	const (
		toA      = "tcp 0.0.0.0:80 10.0.0.1:8080"
		withheld = toA + " (may be decided by an earlier rule "
		sources  = withheld + "for sources that come and go: "
		strange  = withheld + "that is not understood: "
		inside   = "tcp 0.0.0.0:80 192.0.2.2:80 10.0.0.2:8080"
		perhaps  = "a rule of the prerouting hook may take"
	)
	for name, tc := range map[string]struct {
		pre, out, sub [][]byte
		want          []string // one that ends in a space is the beginning
		doubt         string
		problems      []string
	}{
		"all but a list return":                  {pre: rules(join(notIn, verdict(ruleset.VerdictReturn)), a), want: []string{sources}},
		"all but a list are accepted":            {pre: rules(join(notIn, verdict(ruleset.VerdictAccept)), a), want: []string{sources}},
		"all but a list are dropped":             {pre: rules(join(notIn, verdict(ruleset.VerdictDrop)), a), want: []string{sources}},
		"all but a list are dropped in a chain":  {pre: rules(verdict(ruleset.VerdictJump, "sub"), a), sub: rules(join(notIn, verdict(ruleset.VerdictDrop))), want: []string{sources}},
		"all but a list jump to a drop":          {pre: rules(join(notIn, verdict(ruleset.VerdictJump, "sub")), a), sub: rules(verdict(ruleset.VerdictDrop)), want: []string{sources}},
		"all but a list go to an end":            {pre: rules(join(notIn, verdict(ruleset.VerdictGoto, "sub")), a), sub: rules(natrules.Expr("counter"), join(limit, verdict(ruleset.VerdictReturn))), want: []string{sources}},
		"all but a list have a server":           {pre: rules(join(notIn, a), b), want: []string{toA}},
		"all but a list return in output":        {pre: rules(a), out: rules(join(notIn, verdict(ruleset.VerdictReturn)), b), want: []string{toA}},
		"a list returns":                         {pre: rules(join(in, verdict(ruleset.VerdictReturn)), a), want: []string{toA}},
		"a list is dropped":                      {pre: rules(join(in, verdict(ruleset.VerdictDrop)), a), want: []string{toA}},
		"a list has a server":                    {pre: rules(join(in, a)), want: []string{toA + " (limited to sources in @timed)"}},
		"a list returns, others are dropped":     {pre: rules(verdict(ruleset.VerdictJump, "sub"), a), sub: rules(join(in, verdict(ruleset.VerdictReturn)), verdict(ruleset.VerdictDrop)), want: []string{sources}},
		"a list goes back, others are accepted":  {pre: rules(verdict(ruleset.VerdictJump, "sub"), a), sub: rules(join(in, verdict(ruleset.VerdictReturn)), verdict(ruleset.VerdictAccept)), want: []string{sources}},
		"a list returns, another port is closed": {pre: rules(verdict(ruleset.VerdictJump, "sub"), a), sub: rules(join(in, verdict(ruleset.VerdictReturn)), join(natrules.TCP(), natrules.Dport(81), verdict(ruleset.VerdictDrop))), want: []string{toA}},

		"verdicts that come and go":       {pre: rules(join(natrules.TCP(), vmap("verdicts"))), problems: []string{"@verdicts, whose elements come and go"}},
		"verdicts that come and go first": {pre: rules(join(natrules.TCP(), vmap("verdicts")), a), want: []string{strange}, problems: []string{"@verdicts, whose elements come and go"}},
		"verdicts of no known map":        {pre: rules(join(natrules.TCP(), vmap("none")), a), want: []string{strange}, problems: []string{"@none, which is not known"}},

		"first destination":           {pre: rules(join(ct(ruleset.CtKeyDstIP, "192.0.2.2"), a)), want: []string{"tcp 192.0.2.2:80 10.0.0.1:8080"}},
		"first destination elsewhere": {pre: rules(join(ct(ruleset.CtKeyDst, "198.51.100.1"), a), b), want: []string{"tcp 0.0.0.0:80 10.0.0.2:8080"}},
		"first source":                {pre: rules(join(ct(ruleset.CtKeySrcIP, "192.0.2.2"), a)), want: []string{toA + " (limited to source 192.0.2.2)"}},

		"netmap":         {pre: rules(join(port80, target("NETMAP"))), problems: []string{"a prefix mapping"}},
		"unknown target": {pre: rules(join(port80, target("FULLCONENAT")), a), want: []string{strange}, problems: []string{"target FULLCONENAT"}},
		"queue":          {pre: rules(join(port80, natrules.Expr("queue")), a), want: []string{strange}, problems: []string{"queue"}},
		"expression that may translate": {pre: rules(join(port80, natrules.Expr("fullcone")), a), want: []string{strange},
			problems: []string{"fullcone"}},
		"malformed":                     {pre: rules(append([]byte{9, 0, 1, 0}, 1), a), want: []string{strange}, problems: []string{"malformed"}},
		"reject":                        {pre: rules(join(port80, natrules.Expr("reject")), a)},
		"condition that decides naught": {pre: rules(join(port80, limit, natrules.Expr("log")), a), want: []string{toA}},
		"target that decides naught":    {pre: rules(join(port80, target("TEE")), a), want: []string{toA}},

		"writes dscp":                 {pre: rules(dscp, join(dscp, a)), want: []string{toA}},
		"writes ttl":                  {pre: rules(ttl, join(ttl, a)), want: []string{toA}},
		"writes the protocol":         {pre: rules(set(1, 8, "\x00\x00", "\x40\x11"), a), want: []string{strange}, problems: []string{"a payload that is written"}},
		"writes a port":               {pre: rules(join(natrules.TCP(), natrules.Dport(90), dport), a), want: []string{toA}, problems: []string{"a payload that is written"}},
		"writes a port behind IP":     {pre: rules(write(1, 22), a), want: []string{strange}, problems: []string{"a payload that is written"}},
		"writes a port behind a link": {pre: rules(write(0, 36), a), want: []string{strange}, problems: []string{"a payload that is written"}},
		"writes a link":               {pre: rules(write(0, 6), a), want: []string{toA}},
		"writes the port of its rule": {pre: rules(join(port80, dport, natrules.DNAT("10.0.0.2", 80)), a), want: []string{strange}, problems: []string{"a payload that is written"}},

		"server at the loopback":             {pre: rules(join(port80, natrules.DNAT("127.0.0.1", 8080))), want: []string{"tcp 0.0.0.0:80 127.0.0.1:8080"}, doubt: "unless route_localnet"},
		"server at the loopback, in output":  {out: rules(join(port80, natrules.DNAT("127.0.0.1", 8080))), want: []string{"tcp 0.0.0.0:80 192.0.2.2:80 127.0.0.1:8080"}},
		"from the loopback to another":       {out: rules(join(natrules.Daddr("127.0.0.1"), b)), want: []string{"tcp 127.0.0.1:80 10.0.0.2:8080 127.0.0.1:80"}, doubt: "unless route_localnet"},
		"from the loopback to an own":        {out: rules(join(natrules.Daddr("127.0.0.1"), port80, natrules.DNAT("192.0.2.2", 8080))), want: []string{"tcp 127.0.0.1:80 192.0.2.2:8080 127.0.0.1:80"}},
		"output alone":                       {out: rules(b), want: []string{inside}},
		"output, and not understood":         {pre: rules(join(limit, a)), out: rules(b), want: []string{inside}, doubt: perhaps, problems: []string{"limit"}},
		"output, and any port":               {pre: rules(join(natrules.TCP(), natrules.DNAT("10.0.0.1", 8080))), out: rules(b), want: []string{inside}, doubt: perhaps, problems: []string{"matches 65536 ports"}},
		"output, and unknown target":         {pre: rules(join(port80, target("FULLCONENAT"))), out: rules(b), want: []string{inside}, doubt: perhaps, problems: []string{"FULLCONENAT"}},
		"output, and perhaps":                {pre: rules(join(limit, verdict(ruleset.VerdictReturn)), a), out: rules(b), want: []string{inside}, doubt: perhaps},
		"output of one address, and any":     {pre: rules(join(limit, a)), out: rules(join(natrules.Daddr("127.0.0.1"), b)), want: []string{"tcp 127.0.0.1:80 10.0.0.2:8080 127.0.0.1:80"}, doubt: perhaps, problems: []string{"limit"}},
		"output, and of a bridge":            {pre: rules(join(natrules.In("docker0", ruleset.CmpEq), limit, a)), out: rules(b), want: []string{inside}, problems: []string{"limit"}},
		"output, and of another port":        {pre: rules(join(natrules.TCP(), natrules.Dport(81), limit, natrules.DNAT("10.0.0.1", 80))), out: rules(b), want: []string{inside}, problems: []string{"limit"}},
		"output, and later not understood":   {pre: rules(a, join(limit, b)), out: rules(b), want: []string{toA}, problems: []string{"limit"}},
		"output, and dead, not understood":   {pre: rules(join(port80, verdict(ruleset.VerdictReturn)), join(limit, a)), out: rules(b), want: []string{inside}, problems: []string{"limit"}},
		"output, and not for other machines": {pre: rules(join(natrules.Daddr("198.51.100.1"), limit, a)), out: rules(b), want: []string{inside}},
	} {
		t.Run(name, func(t *testing.T) {
			tb := &ruleset.Table{ID: natrules.Table, Chains: append(natrules.BaseChains(), &ruleset.Chain{Name: "sub"}), Sets: []*ruleset.Set{
				{Name: "timed", Flags: setTimeout, KeyLen: 4},
				{Name: "verdicts", Flags: setTimeout | ruleset.SetMap, KeyLen: 2, DataType: ruleset.VerdictDataType},
			}}
			for i, list := range [][][]byte{tc.pre, tc.out, tc.sub} {
				for j, r := range list {
					tb.Chains[i].Rules = append(tb.Chains[i].Rules, ruleset.Rule{Handle: uint64(10*i + j + 1), Raw: r})
				}
			}
			c := compiled(&ruleset.Snapshot{Tables: []*ruleset.Table{tb}})
			got := summary(c.Bindings())
			for i, s := range got {
				if i < len(tc.want) && strings.HasSuffix(tc.want[i], " ") && strings.HasPrefix(s, tc.want[i]) {
					got[i] = tc.want[i]
				}
			}
			if d := cmp.Diff(append([]string{}, tc.want...), got); d != "" {
				t.Error(d)
			}
			if !strings.Contains(strings.Join(tc.want, ""), " (") {
				wantDoubt(t, c.Bindings(), tc.doubt)
			}
			problems, n := c.Problems(10)
			if n != len(tc.problems) {
				t.Fatalf("problems %v, want %q", problems, tc.problems)
			}
			for i, p := range problems {
				if !strings.Contains(p.Reason, tc.problems[i]) {
					t.Errorf("problem %q, want %q", p.Reason, tc.problems[i])
				}
			}
		})
	}
}

// The kernel ends a rule that loads an address of IPv4 from a connection of IPv6, and the other
// way about: it neither translates nor keeps later ones from it.
func TestFirstAddressOfTheOtherFamily(t *testing.T) {
	ct := func(key uint32, op uint32, addr string) []byte {
		return natrules.Join(natrules.Expr("ct", natrules.Num(1, 1), natrules.Num(2, key), ruleset.AppendAttr(nil, 3, []byte{0})), natrules.Cmp(op, 1, netip.MustParseAddr(addr).AsSlice()))
	}
	redirect := natrules.Join(natrules.TCP(), natrules.Dport(80), natrules.Immediate(1, natrules.Port(81)), natrules.Expr("redir", natrules.Num(1, 1)))
	for key, addr := range map[uint32]string{
		ruleset.CtKeySrcIP: "192.0.2.9", ruleset.CtKeyDstIP: "198.51.100.9", ruleset.CtKeySrcIP6: "2001:db8::9", ruleset.CtKeyDstIP6: "2001:db8::9",
	} {
		four := netip.MustParseAddr(addr).Is4()
		for name, rule := range map[string][]byte{
			"translates": natrules.Join(ct(key, ruleset.CmpNeq, addr), redirect),
			"returns":    natrules.Join(ct(key, ruleset.CmpNeq, addr), natrules.Verdict(ruleset.VerdictReturn, "")),
		} {
			tb := &ruleset.Table{ID: ruleset.TableID{Family: ruleset.FamilyInet, Name: "t"}, Chains: natrules.BaseChains()[:1]}
			for i, raw := range [][]byte{rule, redirect} {
				if name == "returns" || i == 0 {
					tb.Chains[0].Rules = append(tb.Chains[0].Rules, ruleset.Rule{Handle: uint64(i + 1), Raw: raw})
				}
			}
			same, other := 0, 0
			for _, b := range compiled(&ruleset.Snapshot{Tables: []*ruleset.Table{tb}}).Bindings() {
				if b.Address.Is4() == four {
					same++
				} else if other++; b.Doubt != "" {
					t.Errorf("key %d %s: %s, %s", key, name, b.Key, b.Doubt)
				}
			}
			if (other > 0) != (name == "returns") || name == "translates" && same == 0 {
				t.Errorf("key %d %s: %d bindings of its family, %d of the other", key, name, same, other)
			}
		}
	}
}

const setTimeout = 0x10 // NFT_SET_TIMEOUT

// Between ::1 and another machine no packet gets anywhere, whatever is set.
func TestAcrossTheLoopbackOfIPv6(t *testing.T) {
	rule := func(to string, when ...[]byte) []byte {
		return natrules.Join(append(when, natrules.TCP(), natrules.Dport(80), natrules.Immediate(1, netip.MustParseAddr(to).AsSlice()),
			natrules.Expr("nat", natrules.Num(1, 1), natrules.Num(2, ruleset.FamilyIP6), natrules.Num(3, 1)))...)
	}
	fromLoopback := natrules.Join(natrules.Payload(1, 24, 16, 1), natrules.Cmp(ruleset.CmpEq, 1, netip.IPv6Loopback().AsSlice()))
	for i, r := range [][]byte{rule("::1"), rule("2001:db8:1::1", fromLoopback)} {
		tb := &ruleset.Table{ID: ruleset.TableID{Family: ruleset.FamilyIP6, Name: "t"}, Chains: natrules.BaseChains()}
		tb.Chains[i].Rules = []ruleset.Rule{{Handle: 1, Raw: r}}
		bs := compiled(&ruleset.Snapshot{Tables: []*ruleset.Table{tb}}).Bindings()
		if len(bs) != 1 || !strings.HasPrefix(bs[0].Doubt, "none: ") {
			t.Errorf("rule %d: %+v", i, bs)
		}
	}
}
