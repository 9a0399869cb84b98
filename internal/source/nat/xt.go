// SPDX-License-Identifier: Apache-2.0

package nat

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"strings"
)

// Layouts of x_tables as user space sees them on 64-bit machines
// (linux/netfilter/x_tables.h, linux/netfilter_ipv4/ip_tables.h,
// linux/netfilter_ipv6/ip6_tables.h).
const (
	xtHeaderLen = 32 // struct xt_entry_match and xt_entry_target without data

	xtVerdictReturn = -5 // XT_RETURN

	invIn    = 0x01
	invOut   = 0x02
	invSrc   = 0x08
	invDst   = 0x10
	invFrag  = 0x20
	invProto = 0x40
)

type entryLayout struct {
	size               int // of struct ipt_entry / ip6t_entry
	src, dst, sm, dm   int
	iif, oif, iifm     int
	oifm, proto, flags int
	invert             int
	addrLen            int
	targetOff          int // u16 target_offset; next_offset follows
	fGoto              byte
	fFrag              byte
}

var (
	layout4 = entryLayout{size: 112, src: 0, dst: 4, sm: 8, dm: 12, iif: 16, oif: 32, iifm: 48, oifm: 64,
		proto: 80, flags: 82, invert: 83, addrLen: 4, targetOff: 88, fGoto: 0x02, fFrag: 0x01}
	layout6 = entryLayout{size: 168, src: 0, dst: 16, sm: 32, dm: 48, iif: 64, oif: 80, iifm: 96, oifm: 112,
		proto: 128, flags: 131, invert: 132, addrLen: 16, targetOff: 140, fGoto: 0x04}
)

func entryLayoutOf(v6 bool) *entryLayout {
	if v6 {
		return &layout6
	}
	return &layout4
}

var errBlob = errors.New("malformed legacy table")

func blobError(off int, what string) error {
	return fmt.Errorf("%w: entry at %d: %s", errBlob, off, what)
}

// legacyInfo is struct ipt_getinfo.
type legacyInfo struct {
	validHooks       uint32
	hook, underflow  [5]uint32
	numEntries, size uint32
}

func parseLegacyInfo(b []byte) (legacyInfo, error) {
	var i legacyInfo
	if len(b) < 84 {
		return i, fmt.Errorf("%w: info of %d bytes", errBlob, len(b))
	}
	u := func(off int) uint32 { return binary.NativeEndian.Uint32(b[off:]) }
	i.validHooks = u(32)
	for k := range 5 {
		i.hook[k], i.underflow[k] = u(36+4*k), u(56+4*k)
	}
	i.numEntries, i.size = u(76), u(80)
	return i, nil
}

var legacyHooks = [...]string{"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"}

// parseLegacy reads the entries of a legacy nat table into chains. The rules'
// bytes are brought to a form without offsets and counters, so that a rule that
// did not change compares equal after the table was replaced.
func parseLegacy(v6 bool, info legacyInfo, blob []byte) (*tableSnap, error) {
	l := entryLayoutOf(v6)
	fam := uint8(famIP)
	if v6 {
		fam = famIP6
	}
	t := &tableSnap{id: tableID{legacy: true, family: fam, name: "nat"}}
	type entry struct{ off, target, next int }
	var entries []entry
	starts := make(map[int]string) // offset of a chain's first rule
	names := make(map[int]string)  // offset of the entry that opens a user chain
	for h := range legacyHooks {
		if info.validHooks&(1<<h) != 0 {
			starts[int(info.hook[h])] = legacyHooks[h]
		}
	}
	for off := 0; off < len(blob); {
		if off+l.size > len(blob) {
			return nil, blobError(off, "short header")
		}
		b := blob[off:]
		to := int(binary.NativeEndian.Uint16(b[l.targetOff:]))
		next := int(binary.NativeEndian.Uint16(b[l.targetOff+2:]))
		if to < l.size || to+xtHeaderLen > next || off+next > len(blob) {
			return nil, blobError(off, "offsets out of range")
		}
		if cstr(b[to+2:to+31]) == "ERROR" {
			name := cstr(b[to+xtHeaderLen : next])
			names[off] = name
			if off+next < len(blob) {
				starts[off+next] = name
			}
		}
		entries = append(entries, entry{off, to, next})
		off += next
	}
	var cur *chainSnap
	for _, e := range entries {
		if _, ok := names[e.off]; ok {
			cur = nil // the header of the chain that begins after it, or the table's end
			continue
		}
		if name, ok := starts[e.off]; ok {
			cur = &chainSnap{name: name}
			for h := range legacyHooks {
				if info.validHooks&(1<<h) != 0 && int(info.hook[h]) == e.off && legacyHooks[h] == name {
					prio := int32(-100)
					if h == 1 || h == 4 {
						prio = 100
					}
					cur.hook = &hookPoint{num: uint32(h), prio: prio, typ: "nat"}
				}
			}
			t.chains = append(t.chains, cur)
		}
		if cur == nil {
			return nil, blobError(e.off, "rule outside of a chain")
		}
		raw, err := normalEntry(l, blob[e.off:e.off+e.next], e.target, e.off, starts)
		if err != nil {
			return nil, err
		}
		cur.rules = append(cur.rules, ruleSnap{raw: raw})
	}
	// A chain's last entry is its policy, or the return of a user chain.
	for _, c := range t.chains {
		if n := len(c.rules); n > 0 {
			if c.hook != nil {
				if exprs, err := parseLegacyRule(v6, c.rules[n-1].raw); err == nil {
					if v, ok := exprs[len(exprs)-1].(exprVerdict); ok {
						c.hook.drop = v.verdict.code == vDrop
					}
				}
			}
			c.rules = c.rules[:n-1]
		}
	}
	return t, nil
}

// normalEntry returns entry b with counters and kernel state cleared and a
// standard target's verdict written as code and chain name.
func normalEntry(l *entryLayout, b []byte, to, off int, starts map[int]string) ([]byte, error) {
	raw := bytes.Clone(b)
	clear(raw[l.targetOff-4 : l.targetOff]) // nfcache
	clear(raw[l.targetOff+4 : l.size])      // comefrom, counters
	if name := cstr(b[to+2 : to+31]); name != "" {
		return raw, nil
	}
	if len(b) < to+xtHeaderLen+4 {
		return nil, blobError(off, "short verdict")
	}
	v := int32(binary.NativeEndian.Uint32(b[to+xtHeaderLen:]))
	code, chain := int32(vContinue), ""
	switch {
	case v == xtVerdictReturn:
		code = vReturn
	case v < 0:
		code = -v - 1
	default:
		var ok bool
		if chain, ok = starts[int(v)]; ok {
			code = vJump
			if b[l.flags]&l.fGoto != 0 {
				code = vGoto
			}
		} else if int(v) != off+len(b) { // a verdict to the next entry is a rule without target
			return nil, blobError(off, "jump into the middle of a chain")
		}
	}
	raw = binary.NativeEndian.AppendUint32(raw[:to+xtHeaderLen], uint32(code))
	raw = append(raw, chain...)
	// next_offset follows the size, which offsets in other rules do not change.
	binary.NativeEndian.PutUint16(raw[l.targetOff+2:], 0)
	return raw, nil
}

// parseLegacyRule reads a rule in the form that normalEntry gives.
func parseLegacyRule(v6 bool, raw []byte) ([]any, error) {
	l := entryLayoutOf(v6)
	if len(raw) < l.size {
		return nil, fmt.Errorf("%w: rule of %d bytes", errBlob, len(raw))
	}
	to := int(binary.NativeEndian.Uint16(raw[l.targetOff:]))
	if to < l.size || to+xtHeaderLen > len(raw) {
		return nil, fmt.Errorf("%w: target at %d of %d", errBlob, to, len(raw))
	}
	h := exprHeader{
		v6:     v6,
		src:    raw[l.src : l.src+l.addrLen],
		dst:    raw[l.dst : l.dst+l.addrLen],
		smask:  raw[l.sm : l.sm+l.addrLen],
		dmask:  raw[l.dm : l.dm+l.addrLen],
		iif:    ifacePattern(raw[l.iif:l.iif+16], raw[l.iifm:l.iifm+16]),
		oif:    ifacePattern(raw[l.oif:l.oif+16], raw[l.oifm:l.oifm+16]),
		proto:  binary.NativeEndian.Uint16(raw[l.proto:]),
		invert: raw[l.invert],
	}
	out := []any{h}
	if l.fFrag != 0 && raw[l.flags]&l.fFrag != 0 && h.invert&invFrag == 0 {
		out = append(out, exprOther{"-f"})
	}
	for off := l.size; off < to; {
		if off+xtHeaderLen > to {
			return nil, fmt.Errorf("%w: short match", errBlob)
		}
		n := int(binary.NativeEndian.Uint16(raw[off:]))
		if n < xtHeaderLen || off+n > to {
			return nil, fmt.Errorf("%w: match of %d bytes", errBlob, n)
		}
		out = append(out, exprMatch{name: cstr(raw[off+2 : off+31]), rev: raw[off+31], info: raw[off+xtHeaderLen : off+n]})
		off += n
	}
	name, info := cstr(raw[to+2:to+31]), raw[to+xtHeaderLen:]
	if name != "" {
		return append(out, exprTarget{name: name, rev: raw[to+31], info: info}), nil
	}
	if len(info) < 4 {
		return nil, fmt.Errorf("%w: short verdict", errBlob)
	}
	v := verdict{code: int32(binary.NativeEndian.Uint32(info)), chain: string(info[4:])}
	if v.code == vContinue {
		return out, nil
	}
	return append(out, exprVerdict{v}), nil
}

// ifacePattern reads a name and its mask; a mask that ends before the NUL means a prefix.
func ifacePattern(name, mask []byte) string {
	n := 0
	for n < len(mask) && mask[n] != 0 {
		n++
	}
	if n == 0 {
		return ""
	}
	s := cstr(name)
	if len(s) < n {
		return s
	}
	return s[:n] + "*"
}

// Flags of nat ranges (linux/netfilter/nf_nat.h).
const (
	natMapIPs     = 1 << 0
	natProtoSet   = 1 << 1
	natProtoShift = 1 << 5
	natNetmap     = 1 << 6
)

// xtNat reads the range of a DNAT or REDIRECT target; nil and a reason when it
// is not understood.
func xtNat(v6 bool, t exprTarget) (*natAction, string) {
	n := &natAction{redirect: t.name == "REDIRECT"}
	b := t.info
	var flags uint32
	var lo, hi []byte
	var ports []byte
	old := !v6 && (t.name == "REDIRECT" && t.rev == 0 || t.name == "DNAT" && t.rev == 0)
	switch {
	case old: // struct nf_nat_ipv4_multi_range_compat
		if len(b) < 20 || binary.NativeEndian.Uint32(b) != 1 {
			return nil, "a range of several parts"
		}
		flags, lo, hi, ports = binary.NativeEndian.Uint32(b[4:]), b[8:12], b[12:16], b[16:20]
	case t.rev <= 2: // struct nf_nat_range, nf_nat_range2
		if len(b) < 40 || t.rev == 2 && len(b) < 42 {
			return nil, "a short range"
		}
		flags, lo, hi, ports = binary.NativeEndian.Uint32(b), b[4:20], b[20:36], b[36:40]
		if !v6 {
			lo, hi = lo[:4], hi[:4]
		}
	default:
		return nil, fmt.Sprintf("revision %d of target %s", t.rev, t.name)
	}
	if flags&natMapIPs != 0 && !n.redirect {
		a, _ := netip.AddrFromSlice(lo)
		z, _ := netip.AddrFromSlice(hi)
		n.setAddrs(a, z)
	}
	if flags&natProtoSet != 0 {
		n.setPorts(binary.BigEndian.Uint16(ports), binary.BigEndian.Uint16(ports[2:]))
		if flags&natProtoShift != 0 {
			if t.rev != 2 {
				return nil, "a shifted range in an old revision"
			}
			n.shift, n.base = true, binary.BigEndian.Uint16(b[40:])
		}
	}
	if flags&natNetmap != 0 {
		return nil, "a prefix mapping"
	}
	return n, ""
}

func (n *natAction) setAddrs(lo, hi netip.Addr) {
	for a := lo; a.IsValid() && a.Compare(hi) <= 0; a = a.Next() {
		if len(n.addrs) == rangeAddrs {
			n.more = true
			return
		}
		n.addrs = append(n.addrs, a)
	}
	if len(n.addrs) == 0 && lo.IsValid() {
		n.addrs = append(n.addrs, lo)
	}
}

func (n *natAction) setPorts(lo, hi uint16) {
	n.ports, n.setsPorts = span[uint16]{lo, max(lo, hi)}, true
}

// header narrows s by a legacy rule's header.
func (s *state) header(h exprHeader) {
	o := addrOrderOf(h.v6)
	addr := func(a, mask []byte, neg bool) set[netip.Addr] {
		lo, hi, ok := maskSpan(a, mask)
		if !ok {
			s.blind("an address mask with holes")
			return nil
		}
		r := o.normal([]span[netip.Addr]{{lo, hi}})
		if neg {
			return o.complement(r)
		}
		return r
	}
	s.m.saddr = o.intersect(s.m.saddr, addr(h.src, h.smask, h.invert&invSrc != 0))
	s.m.daddr = o.intersect(s.m.daddr, addr(h.dst, h.dmask, h.invert&invDst != 0))
	if h.iif != "" {
		s.m.iif = s.m.iif.intersect(ifaceIn(h.invert&invIn != 0, h.iif))
	}
	if h.oif != "" {
		s.m.oif = s.m.oif.intersect(ifaceIn(h.invert&invOut != 0, h.oif))
	}
	if h.proto != 0 {
		bit := uint8(0)
		if h.proto < 256 {
			bit = protoBit(byte(h.proto))
		}
		if h.invert&invProto != 0 {
			bit = bitsBoth &^ bit
		}
		s.m.proto &= bit
	}
}

// maskSpan returns the first and last address that a under mask stands for.
func maskSpan(a, mask []byte) (lo, hi netip.Addr, ok bool) {
	l, h := make([]byte, len(a)), make([]byte, len(a))
	gap := false
	for i := range a {
		m := mask[i]
		inv := ^m
		if gap && m != 0 || inv&(inv+1) != 0 {
			return lo, hi, false
		}
		if m != 0xff {
			gap = true
		}
		l[i], h[i] = a[i]&m, a[i]&m|inv
	}
	lo, _ = netip.AddrFromSlice(l)
	hi, _ = netip.AddrFromSlice(h)
	return lo, hi, true
}

// States of a connection as xt_conntrack and ct state have them; nat chains see
// only the first packet of one.
const (
	ctInvalid     = 1 << 0
	ctEstablished = 1 << 1
	ctRelated     = 1 << 2
	ctNew         = 1 << 3
)

// match narrows s by an x_tables match.
func (s *state) match(e exprMatch) {
	b := e.info
	short := func(n int) bool {
		if len(b) < n {
			s.blind("match " + e.name + " cut short")
			return true
		}
		return false
	}
	u16 := func(off int) uint16 { return binary.NativeEndian.Uint16(b[off:]) }
	u32 := func(off int) uint32 { return binary.NativeEndian.Uint32(b[off:]) }
	ports := func(off int, neg bool) set[uint16] {
		r := portOrder.normal([]span[uint16]{{u16(off), u16(off + 2)}})
		if neg {
			return portOrder.complement(r)
		}
		return r
	}
	switch {
	case e.name == "tcp" && e.rev == 0:
		if short(12) {
			return
		}
		s.m.proto &= bitTCP
		if !ports(0, b[11]&1 != 0).all() {
			s.blind("source port")
		}
		s.m.dport = portOrder.intersect(s.m.dport, ports(4, b[11]&2 != 0))
		if b[8] != 0 {
			s.blind("tcp option")
		}
		// A new connection's first packet has SYN of FIN,SYN,RST,ACK.
		if mask, want := b[9], b[10]; mask != 0 && (want != 0x02&mask || mask&^0x17 != 0) != (b[11]&4 != 0) {
			s.blind("tcp flags")
		}
	case e.name == "udp" && e.rev == 0:
		if short(9) {
			return
		}
		s.m.proto &= bitUDP
		if !ports(0, b[8]&1 != 0).all() {
			s.blind("source port")
		}
		s.m.dport = portOrder.intersect(s.m.dport, ports(4, b[8]&2 != 0))
	case e.name == "multiport" && e.rev <= 1:
		if short(32) || e.rev == 1 && short(48) {
			return
		}
		if b[0] != 1 {
			s.blind("source ports")
			return
		}
		var in []span[uint16]
		for i := 0; i < min(int(b[1]), 15); i++ {
			p := u16(2 + 2*i)
			r := span[uint16]{p, p}
			if e.rev == 1 && b[32+i] != 0 && i+1 < min(int(b[1]), 15) {
				i++
				r.hi = u16(2 + 2*i)
			}
			in = append(in, r)
		}
		r := portOrder.normal(in)
		if e.rev == 1 && b[47] != 0 {
			r = portOrder.complement(r)
		}
		s.m.dport = portOrder.intersect(s.m.dport, r)
	case e.name == "addrtype" && e.rev <= 1:
		if short(8) || e.rev == 0 && short(12) {
			return
		}
		src, dst := u16(0), u16(2)
		invSrc, invDst := u32(4) != 0, e.rev == 0 && u32(min(8, len(b)-4)) != 0
		if e.rev == 1 {
			f := u32(4)
			invSrc, invDst = f&1 != 0, f&2 != 0
			if f&^3 != 0 {
				s.blind("addrtype of one interface")
			}
		}
		const local = 1 << 2 // RTN_LOCAL
		if dst != 0 && (dst&local != 0) == invDst {
			s.m.proto = 0
		}
		if src != 0 {
			switch {
			case src == local:
				s.source(!invSrc)
			case src&local == 0 && invSrc:
			case src&local != 0 && invSrc:
				s.source(false)
			default:
				s.blind("source address type")
			}
		}
	case e.name == "comment", e.name == "nfacct":
	case e.name == "conntrack" && e.rev >= 1 && e.rev <= 3:
		s.conntrack(e, short)
	case e.name == "state":
		if !short(4) {
			s.ctState(u32(0), false)
		}
	case e.name == "mark" && e.rev == 1:
		if !short(9) && (u32(0) == 0) == (b[8] != 0) {
			s.m.marked = true
		}
	case e.name == "recent" && e.rev <= 1: // struct xt_recent_mtinfo, _v1
		if short(11) {
			return
		}
		const check, set, update = 1, 2, 4
		switch how := b[8]; {
		case b[9] != 0 || how&(check|set|update) == 0:
			s.blind("match recent")
		case how&set == 0:
			s.m.maybe, s.m.clients = true, "the recent list "+strings.ToValidUTF8(cstr(b[10:]), "?")
		}
	case e.name == "statistic":
		s.m.maybe = true
	default:
		s.blind("match " + e.name)
	}
}

func (s *state) source(local bool) {
	want := uint8(srcRemote)
	if local {
		want = srcLocal
	}
	if s.m.src != srcAny && s.m.src != want {
		s.m.proto = 0
	}
	s.m.src = want
}

// ctState narrows s to connections whose state is in mask (or not, if neg).
func (s *state) ctState(mask uint32, neg bool) {
	hasNew, hasRelated := mask&ctNew != 0 != neg, mask&ctRelated != 0 != neg
	switch {
	case hasNew:
	case hasRelated:
		s.m.marked = true
	default:
		s.m.proto = 0
	}
}

// conntrack reads struct xt_conntrack_mtinfo1, 2 and 3.
func (s *state) conntrack(e exprMatch, short func(int) bool) {
	const addrs = 128 // four addresses with masks
	if short(addrs + 8 + 2 + 8 + 6) {
		return
	}
	b := e.info
	u16 := func(off int) uint16 { return binary.NativeEndian.Uint16(b[off:]) }
	match, invert := u16(146), u16(148)
	states := uint32(b[150])
	if e.rev >= 2 {
		if short(154) {
			return
		}
		states = uint32(u16(150))
	}
	const (
		fState   = 1 << 0
		fProto   = 1 << 1
		fOrigDst = 1 << 3
		fDstPort = 1 << 9
	)
	n := 4
	if s.v6 {
		n = 16
	}
	o := addrOrderOf(s.v6)
	if match&fState != 0 {
		s.ctState(states, invert&fState != 0)
	}
	if match&fProto != 0 {
		bit := protoBit(byte(u16(136)))
		if invert&fProto != 0 {
			bit = bitsBoth &^ bit
		}
		s.m.proto &= bit
	}
	if match&fOrigDst != 0 {
		lo, hi, ok := maskSpan(b[32:32+n], b[48:48+n])
		if !ok {
			s.blind("an address mask with holes")
			return
		}
		r := o.normal([]span[netip.Addr]{{lo, hi}})
		if invert&fOrigDst != 0 {
			r = o.complement(r)
		}
		s.m.daddr = o.intersect(s.m.daddr, r)
	}
	if match&fDstPort != 0 {
		lo := binary.BigEndian.Uint16(b[140:])
		hi := lo
		if e.rev == 3 {
			if short(162) {
				return
			}
			lo, hi = u16(140), u16(156)
		}
		r := portOrder.normal([]span[uint16]{{lo, hi}})
		if invert&fDstPort != 0 {
			r = portOrder.complement(r)
		}
		s.m.dport = portOrder.intersect(s.m.dport, r)
	}
	if rest := match &^ (fState | fProto | fOrigDst | fDstPort); rest != 0 {
		s.blind("match conntrack")
	}
}

// target ends the rule, or not; ok is false when it goes on to the next expression.
func (s *state) target(e exprTarget) (branchEnd, bool) {
	switch e.name {
	case "DNAT", "REDIRECT":
		n, why := xtNat(s.v6, e)
		return branchEnd{kind: endNat, nat: n, why: why}, true
	case "LOG", "MARK", "CONNMARK", "NFLOG", "TRACE", "CLASSIFY", "SET", "ULOG", "AUDIT", "CONNSECMARK", "SECMARK":
		return branchEnd{}, false
	case "MASQUERADE", "SNAT":
		return branchEnd{}, false // of POSTROUTING; the packet's destination stays
	case "ACCEPT":
		return branchEnd{kind: endAccept}, true
	case "DROP":
		return branchEnd{kind: endDrop}, true
	case "RETURN":
		return branchEnd{kind: endReturn}, true
	}
	return branchEnd{kind: endUnknown, why: "target " + strings.ToValidUTF8(e.name, "?")}, true
}
