// SPDX-License-Identifier: Apache-2.0

package nat

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"net/netip"
	"strings"

	"github.com/fairlead/fairlead/internal/port"
)

const maxText = 400 // bytes of a rule's text

// ruleText renders a rule for people: native expressions as nft writes them,
// x_tables ones as iptables-save does. It comes from the guest and is to be quoted.
func ruleText(r *rule) string {
	t := text{v6: r.chain.table.id.family == famIP6}
	var exprs []any
	var err error
	if r.chain.table.id.legacy {
		exprs, err = parseLegacyRule(t.v6, r.raw)
	} else {
		exprs, err = parseExprs(r.raw)
	}
	if err != nil {
		return err.Error()
	}
	for _, x := range exprs {
		t.expr(x)
	}
	s := strings.ToValidUTF8(strings.Join(t.out, " "), "?")
	if len(s) > maxText {
		s = strings.ToValidUTF8(s[:maxText], "") + "…"
	}
	return s
}

type text struct {
	v6   bool
	out  []string
	regs [16]string // what is in each four-byte register
	data [16][]byte
}

func (t *text) add(f string, a ...any) { t.out = append(t.out, fmt.Sprintf(f, a...)) }

func (t *text) set(r uint32, name string, data []byte) {
	if i, ok := regIndex(r); ok {
		t.regs[i], t.data[i] = name, data
		for k := 4; k < len(data) && i+k/4 < len(t.regs); k += 4 {
			t.regs[i+k/4], t.data[i+k/4] = "", data[k:]
		}
	}
}

// get names what register r holds, up to n bytes.
func (t *text) get(r uint32, n int) string {
	i, ok := regIndex(r)
	if !ok {
		return "?"
	}
	s := t.regs[i]
	for k := 4; k < n && i+k/4 < len(t.regs); k += 4 {
		if next := t.regs[i+k/4]; next != "" && next != s {
			s += " . " + next
		}
	}
	return s
}

func (t *text) constant(r uint32) []byte {
	if i, ok := regIndex(r); ok {
		return t.data[i]
	}
	return nil
}

func (t *text) payloadName(base, off, n uint32) string {
	switch {
	case base == 2 && off == 2 && n == 2:
		return "th dport"
	case base == 2 && off == 0 && n == 2:
		return "th sport"
	case base == 1 && n <= 4 && off == 16:
		return "ip daddr"
	case base == 1 && n <= 4 && off == 12:
		return "ip saddr"
	case base == 1 && off == 24 && n <= 16:
		return "ip6 daddr"
	case base == 1 && off == 8 && n <= 16:
		return "ip6 saddr"
	}
	return fmt.Sprintf("@%d,%d,%d", base, off*8, n*8)
}

// value renders b as what name holds.
func (t *text) value(name string, b []byte) string {
	switch {
	case strings.HasSuffix(name, "port") && len(b) >= 2:
		return fmt.Sprint(binary.BigEndian.Uint16(b))
	case strings.HasSuffix(name, "addr") && (len(b) == 4 || len(b) == 16):
		a, _ := netip.AddrFromSlice(b)
		return a.String()
	case strings.HasSuffix(name, "addr") && len(b) < 16:
		full := make([]byte, 4)
		if strings.HasPrefix(name, "ip6") {
			full = make([]byte, 16)
		}
		copy(full, b)
		a, _ := netip.AddrFromSlice(full)
		return fmt.Sprintf("%s/%d", a, len(b)*8)
	case strings.HasSuffix(name, "ifname"):
		s := cstr(b)
		if len(s) == len(b) {
			s += "*"
		}
		return fmt.Sprintf("%q", s)
	case strings.HasSuffix(name, "l4proto") && len(b) == 1:
		return port.Protocol(b[0]).String()
	case strings.HasPrefix(name, "fib") && len(b) == 4 && binary.NativeEndian.Uint32(b) == rtnLocal:
		return "local"
	case len(b) == 4:
		return fmt.Sprintf("%#x", binary.NativeEndian.Uint32(b))
	}
	return "0x" + hex.EncodeToString(b)
}

var cmpText = [...]string{"", "!= ", "< ", "<= ", "> ", ">= "}

func (t *text) expr(x any) {
	switch e := x.(type) {
	case exprImmediate:
		if e.verdict != nil {
			t.add("%s", verdictText(*e.verdict))
			return
		}
		t.set(e.dreg, "", e.data)
	case exprVerdict:
		t.add("-j %s", strings.TrimPrefix(strings.TrimPrefix(verdictText(e.verdict), "jump "), "goto "))
	case exprCmp:
		op := fmt.Sprintf("op-%d ", e.op)
		if int(e.op) < len(cmpText) {
			op = cmpText[e.op]
		}
		name := t.get(e.sreg, len(e.data))
		t.add("%s %s%s", name, op, t.value(name, e.data))
	case exprRange:
		name := t.get(e.sreg, len(e.from))
		neg := ""
		if e.op == cmpNeq {
			neg = "!= "
		}
		t.add("%s %s%s-%s", name, neg, t.value(name, e.from), t.value(name, e.to))
	case exprPayload:
		if e.sreg == 0 {
			t.set(e.dreg, t.payloadName(e.base, e.offset, e.length), nil)
			return
		}
		t.add("payload set")
	case exprMeta:
		name, ok := metaNames[e.key]
		if !ok {
			name = fmt.Sprintf("meta %d", e.key)
		}
		if e.sreg != 0 {
			t.add("%s set %s", name, t.value("", t.constant(e.sreg)))
			return
		}
		t.set(e.dreg, name, nil)
	case exprCt:
		name := fmt.Sprintf("ct key %d", e.key)
		if e.key == ctKeyState {
			name = "ct state"
		}
		if e.sreg != 0 {
			t.add("%s set", name)
			return
		}
		t.set(e.dreg, name, nil)
	case exprFib:
		name := "fib"
		if e.flags&fibSaddr != 0 {
			name += " saddr"
		}
		if e.flags&fibDaddr != 0 {
			name += " daddr"
		}
		if e.result == fibAddrtype {
			name += " type"
		}
		t.set(e.dreg, name, nil)
	case exprBitwise:
		t.set(e.dreg, t.get(e.sreg, int(min(e.length, 64)))+" & 0x"+hex.EncodeToString(e.mask), nil)
	case exprByteorder:
	case exprNumgen:
		t.set(e.dreg, fmt.Sprintf("%s mod %d", e.what, e.modulus), nil)
	case exprLookup:
		name := t.get(e.sreg, 64)
		switch {
		case e.hasDreg && e.dreg == 0:
			t.add("%s vmap @%s", name, e.set)
		case e.hasDreg:
			t.set(e.dreg, name+" map @"+e.set, nil)
		case e.invert:
			t.add("%s != @%s", name, e.set)
		default:
			t.add("%s @%s", name, e.set)
		}
	case exprNat:
		kind := "snat"
		if e.kind == 1 {
			kind = "dnat"
		}
		t.add("%s to %s", kind, t.natText(e.addrMin, e.protoMin, e.family == famIP6))
	case exprRedir:
		s := "redirect"
		if e.protoMin != 0 {
			s += " to " + t.natText(0, e.protoMin, false)
		}
		t.add("%s", s)
	case exprPass:
	case exprOther:
		t.add("[%s]", e.name)
	case exprHeader:
		t.header(e)
	case exprMatch:
		t.match(e)
	case exprTarget:
		t.target(e)
	}
}

func verdictText(v verdict) string {
	switch v.code {
	case vDrop:
		return "drop"
	case vAccept:
		return "accept"
	case vReturn:
		return "return"
	case vJump:
		return "jump " + v.chain
	case vGoto:
		return "goto " + v.chain
	case vContinue:
		return "continue"
	}
	return fmt.Sprintf("verdict %d", v.code)
}

func (t *text) natText(addr, proto uint32, v6 bool) string {
	s := ""
	if addr != 0 {
		d, n := t.constant(addr), 4
		if v6 {
			n = 16
		}
		if len(d) >= n {
			a, _ := netip.AddrFromSlice(d[:n])
			s = a.String()
			if v6 {
				s = "[" + s + "]"
			}
		} else {
			s = t.get(addr, n)
		}
	}
	if proto != 0 {
		if d := t.constant(proto); len(d) >= 2 {
			s += fmt.Sprintf(":%d", binary.BigEndian.Uint16(d))
		} else if name := t.get(proto, 2); name != "" {
			s += ":" + name
		}
	}
	return s
}

func (t *text) header(h exprHeader) {
	neg := func(bit uint8) string { return not(h.invert&bit != 0) }
	addr := func(flag string, bit uint8, a, mask []byte) {
		if len(bytes.Trim(mask, "\x00")) == 0 && h.invert&bit == 0 {
			return
		}
		s := hex.EncodeToString(a) + "/" + hex.EncodeToString(mask)
		if r, ok := maskRange(a, mask); ok {
			s = r.String()
		}
		t.add("%s%s %s", neg(bit), flag, s)
	}
	addr("-s", invSrc, h.src, h.smask)
	addr("-d", invDst, h.dst, h.dmask)
	if h.iif != "" {
		t.add("%s-i %s", neg(invIn), strings.Replace(h.iif, "*", "+", 1))
	}
	if h.oif != "" {
		t.add("%s-o %s", neg(invOut), strings.Replace(h.oif, "*", "+", 1))
	}
	if h.proto != 0 {
		t.add("%s-p %s", neg(invProto), port.Protocol(h.proto))
	}
}

func (t *text) match(e exprMatch) {
	decoded, _ := e.decode(t.v6)
	switch m := decoded.(type) {
	case addrtypeMatch:
		t.add("-m addrtype")
		t.addrtype("src", m.src, m.notSrc)
		t.addrtype("dst", m.dst, m.notDst)
	case portMatch:
		t.add("-m %s", e.name)
		t.port("sport", m.src, m.notSrc)
		t.port("dport", m.dst, m.notDst)
	case multiportMatch:
		flag := "--sports"
		if m.dst {
			flag = "--dports"
		}
		ports := make([]string, len(m.ports))
		for i, r := range m.ports {
			ports[i] = r.String()
		}
		t.add("-m %s %s%s %s", e.name, not(m.invert), flag, strings.Join(ports, ","))
	default:
		if e.name == "comment" {
			t.add("-m comment --comment %q", cstr(e.info))
			return
		}
		t.add("-m %s", e.name)
	}
}

func (t *text) port(side string, r portRange, invert bool) {
	if !r.all() || invert {
		t.add("%s--%s %s", not(invert), side, r)
	}
}

func not(yes bool) string {
	if yes {
		return "! "
	}
	return ""
}

func (t *text) addrtype(side string, types uint16, invert bool) {
	if types == 0 {
		return
	}
	kind := fmt.Sprintf("%#x", types)
	if types == 1<<rtnLocal {
		kind = "LOCAL"
	}
	t.add("%s--%s-type %s", not(invert), side, kind)
}

func (t *text) target(e exprTarget) {
	if e.name != "DNAT" && e.name != "REDIRECT" {
		t.add("-j %s", e.name)
		return
	}
	n, err := e.decodeNAT(t.v6)
	if err != nil {
		t.add("-j %s (%s)", e.name, err)
		return
	}
	to := ""
	if a := n.addrs; a.first.IsValid() {
		to = a.first.String()
		if a.first.Is6() {
			to = "[" + to + "]"
		}
		if a.last != a.first {
			to += "-…"
		}
	}
	if n.setsPort {
		if !n.redirect {
			to += ":"
		}
		to += strings.Replace(n.ports.String(), ":", "-", 1)
	}
	switch {
	case n.redirect && to != "":
		t.add("-j REDIRECT --to-ports %s", to)
	case n.redirect:
		t.add("-j REDIRECT")
	default:
		t.add("-j DNAT --to-destination %s", to)
	}
}
