// SPDX-License-Identifier: Apache-2.0

package ruleset

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

// Text returns the human-readable text of a rule: native expressions as nft
// writes them, those of x_tables as iptables-save does. It holds what the guest
// wrote, and is to be quoted.
func Text(in TableID, raw []byte) string {
	t := text{v6: in.Family == FamilyIP6}
	exprs, err := ParseRule(in, raw)
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
	if i, ok := RegIndex(r); ok {
		t.regs[i], t.data[i] = name, data
		for k := 4; k < len(data) && i+k/4 < len(t.regs); k += 4 {
			t.regs[i+k/4], t.data[i+k/4] = "", data[k:]
		}
	}
}

// get names what register r holds, up to n bytes.
func (t *text) get(r uint32, n int) string {
	i, ok := RegIndex(r)
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
	if i, ok := RegIndex(r); ok {
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
		s := CString(b)
		if len(s) == len(b) {
			s += "*"
		}
		return fmt.Sprintf("%q", s)
	case strings.HasSuffix(name, "l4proto") && len(b) == 1:
		return port.Protocol(b[0]).String()
	case strings.HasPrefix(name, "fib") && len(b) == 4 && binary.NativeEndian.Uint32(b) == RtnLocal:
		return "local"
	case len(b) == 4:
		return fmt.Sprintf("%#x", binary.NativeEndian.Uint32(b))
	}
	return "0x" + hex.EncodeToString(b)
}

var cmpText = [...]string{"", "!= ", "< ", "<= ", "> ", ">= "}

// expr adds what an expression does, or notes what it loads.
func (t *text) expr(x any) {
	switch e := x.(type) {
	case Immediate:
		if e.Verdict != nil {
			t.add("%s", verdictText(*e.Verdict))
			return
		}
		t.set(e.Dreg, "", e.Data)
	case Cmp:
		op := fmt.Sprintf("op-%d ", e.Op)
		if int(e.Op) < len(cmpText) {
			op = cmpText[e.Op]
		}
		name := t.get(e.Sreg, len(e.Data))
		t.add("%s %s%s", name, op, t.value(name, e.Data))
	case Range:
		name := t.get(e.Sreg, len(e.From))
		neg := ""
		if e.Op == CmpNeq {
			neg = cmpText[CmpNeq]
		}
		t.add("%s %s%s-%s", name, neg, t.value(name, e.From), t.value(name, e.To))
	case Lookup:
		t.lookup(e)
	case NAT:
		kind := "snat"
		if e.Kind == 1 {
			kind = "dnat"
		}
		t.add("%s to %s", kind, t.natText(e.AddrMin, e.ProtoMin, e.Family == FamilyIP6))
	case Redirect:
		s := "redirect"
		if e.ProtoMin != 0 {
			s += " to " + t.natText(0, e.ProtoMin, false)
		}
		t.add("%s", s)
	case Other:
		t.add("[%s]", e.Name)
	case Header:
		t.header(e)
	case Match:
		t.match(e)
	case Target:
		t.target(e)
	case StandardTarget:
		t.add("-j %s", strings.TrimPrefix(strings.TrimPrefix(verdictText(e.Verdict), "jump "), "goto "))
	default:
		t.load(x)
	}
}

// load notes what an expression loads, or adds what it writes to the packet.
func (t *text) load(x any) {
	switch e := x.(type) {
	case Payload:
		if e.Sreg != 0 {
			t.add("payload set")
			return
		}
		t.set(e.Dreg, t.payloadName(e.Base, e.Offset, e.Length), nil)
	case Meta:
		name, ok := MetaNames[e.Key]
		if !ok {
			name = fmt.Sprintf("meta %d", e.Key)
		}
		if e.Sreg != 0 {
			t.add("%s set %s", name, t.value("", t.constant(e.Sreg)))
			return
		}
		t.set(e.Dreg, name, nil)
	case Ct:
		if e.Sreg != 0 {
			t.add("%s set", e.Name())
			return
		}
		t.set(e.Dreg, e.Name(), nil)
	case Fib:
		t.set(e.Dreg, fibName(e), nil)
	case Bitwise:
		t.set(e.Dreg, t.get(e.Sreg, int(min(e.Length, 64)))+" & 0x"+hex.EncodeToString(e.Mask), nil)
	case Numgen:
		t.set(e.Dreg, fmt.Sprintf("%s mod %d", e.What, e.Modulus), nil)
	}
}

func fibName(e Fib) string {
	name := "fib"
	if e.Flags&FibSaddr != 0 {
		name += " saddr"
	}
	if e.Flags&FibDaddr != 0 {
		name += " daddr"
	}
	if e.Result == FibAddrtype {
		name += " type"
	}
	return name
}

func (t *text) lookup(e Lookup) {
	name := t.get(e.Sreg, 64)
	switch {
	case e.HasDreg && e.Dreg == 0:
		t.add("%s vmap @%s", name, e.Set)
	case e.HasDreg:
		t.set(e.Dreg, name+" map @"+e.Set, nil)
	case e.Invert:
		t.add("%s != @%s", name, e.Set)
	default:
		t.add("%s @%s", name, e.Set)
	}
}

func verdictText(v Verdict) string {
	switch v.Code {
	case VerdictDrop:
		return "drop"
	case VerdictAccept:
		return "accept"
	case VerdictReturn:
		return "return"
	case VerdictJump:
		return "jump " + v.Chain
	case VerdictGoto:
		return "goto " + v.Chain
	case VerdictContinue:
		return "continue"
	}
	return fmt.Sprintf("verdict %d", v.Code)
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

func (t *text) header(h Header) {
	neg := func(bit uint8) string { return not(h.Invert&bit != 0) }
	addr := func(flag string, bit uint8, a, mask []byte) {
		if len(bytes.Trim(mask, "\x00")) == 0 && h.Invert&bit == 0 {
			return
		}
		s := hex.EncodeToString(a) + "/" + hex.EncodeToString(mask)
		if r, ok := MaskRange(a, mask); ok {
			s = r.String()
		}
		t.add("%s%s %s", neg(bit), flag, s)
	}
	addr("-s", InvSrc, h.Src, h.SrcMask)
	addr("-d", InvDst, h.Dst, h.DstMask)
	if h.In != "" {
		t.add("%s-i %s", neg(InvIn), strings.Replace(h.In, "*", "+", 1))
	}
	if h.Out != "" {
		t.add("%s-o %s", neg(InvOut), strings.Replace(h.Out, "*", "+", 1))
	}
	if h.Proto != 0 {
		t.add("%s-p %s", neg(InvProto), port.Protocol(h.Proto))
	}
}

func (t *text) match(e Match) {
	decoded, _ := e.Decode(t.v6)
	switch m := decoded.(type) {
	case AddrtypeMatch:
		t.add("-m addrtype")
		t.addrtype("src", m.Src, m.NotSrc)
		t.addrtype("dst", m.Dst, m.NotDst)
	case PortMatch:
		t.add("-m %s", e.Name)
		t.port("sport", m.Src, m.NotSrc)
		t.port("dport", m.Dst, m.NotDst)
	case MultiportMatch:
		flag := "--sports"
		if m.Dst {
			flag = "--dports"
		}
		ports := make([]string, len(m.Ports))
		for i, r := range m.Ports {
			ports[i] = r.String()
		}
		t.add("-m %s %s%s %s", e.Name, not(m.Invert), flag, strings.Join(ports, ","))
	default:
		if e.Name == "comment" {
			t.add("-m comment --comment %q", CString(e.Info))
			return
		}
		t.add("-m %s", e.Name)
	}
}

func (t *text) port(side string, r PortRange, invert bool) {
	if !r.All() || invert {
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
	if types == 1<<RtnLocal {
		kind = "LOCAL"
	}
	t.add("%s--%s-type %s", not(invert), side, kind)
}

func (t *text) target(e Target) {
	if e.Name != "DNAT" && e.Name != "REDIRECT" {
		t.add("-j %s", e.Name)
		return
	}
	n, err := e.DecodeNAT(t.v6)
	if err != nil {
		t.add("-j %s (%s)", e.Name, err)
		return
	}
	to := ""
	if a := n.Addrs; a.First.IsValid() {
		to = a.First.String()
		if a.First.Is6() {
			to = "[" + to + "]"
		}
		if a.Last != a.First {
			to += "-…"
		}
	}
	if n.SetsPort {
		if !n.Redirect {
			to += ":"
		}
		to += strings.Replace(n.Ports.String(), ":", "-", 1)
	}
	switch {
	case n.Redirect && to != "":
		t.add("-j REDIRECT --to-ports %s", to)
	case n.Redirect:
		t.add("-j REDIRECT")
	default:
		t.add("-j DNAT --to-destination %s", to)
	}
}
