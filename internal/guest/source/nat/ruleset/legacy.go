// SPDX-License-Identifier: Apache-2.0

package ruleset

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
)

// Layouts of x_tables as user space sees them on 64-bit machines
// (linux/netfilter/x_tables.h, linux/netfilter_ipv4/ip_tables.h,
// linux/netfilter_ipv6/ip6_tables.h).
const (
	xtHeaderLen = 32 // struct xt_entry_match and xt_entry_target without data

	xtVerdictReturn = -5 // XT_RETURN

	InvIn    = 0x01
	InvOut   = 0x02
	InvSrc   = 0x08
	InvDst   = 0x10
	invFrag  = 0x20
	InvProto = 0x40
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

// ErrMalformedTable means that a legacy table cannot be decoded.
var ErrMalformedTable = errors.New("malformed legacy table")

func blobError(off int, what string) error {
	return fmt.Errorf("%w: entry at %d: %s", ErrMalformedTable, off, what)
}

// LegacyInfo is struct ipt_getinfo.
type LegacyInfo struct {
	ValidHooks      uint32
	Hook, Underflow [5]uint32
	Entries, Size   uint32
}

// ParseLegacyInfo decodes struct ipt_getinfo.
func ParseLegacyInfo(b []byte) (LegacyInfo, error) {
	var i LegacyInfo
	if len(b) < 84 {
		return i, fmt.Errorf("%w: info of %d bytes", ErrMalformedTable, len(b))
	}
	u := func(off int) uint32 { return binary.NativeEndian.Uint32(b[off:]) }
	i.ValidHooks = u(32)
	for k := range 5 {
		i.Hook[k], i.Underflow[k] = u(36+4*k), u(56+4*k)
	}
	i.Entries, i.Size = u(76), u(80)
	return i, nil
}

var legacyHooks = [...]string{"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"}

// ParseLegacy reads the entries of a legacy nat table into chains. The rules'
// bytes are brought to a form without offsets and counters, so that a rule that
// did not change compares equal after the table was replaced.
func ParseLegacy(v6 bool, info LegacyInfo, blob []byte) (*Table, error) {
	p := &legacyParser{v6: v6, layout: entryLayoutOf(v6), blob: blob,
		hooks: make(map[int]int), starts: make(map[int]string), opens: make(map[int]bool)}
	for h, name := range legacyHooks {
		if info.ValidHooks&(1<<h) != 0 {
			p.hooks[int(info.Hook[h])], p.starts[int(info.Hook[h])] = h, name
		}
	}
	if err := p.split(); err != nil {
		return nil, err
	}
	t := &Table{ID: TableID{Legacy: true, Family: FamilyIP, Name: "nat"}}
	if v6 {
		t.ID.Family = FamilyIP6
	}
	if err := p.chains(t); err != nil {
		return nil, err
	}
	for _, c := range t.Chains {
		p.endChain(c)
	}
	return t, nil
}

type legacyEntry struct{ off, target, next int }

// legacyParser reads one legacy table.
type legacyParser struct {
	v6      bool
	layout  *entryLayout
	blob    []byte
	entries []legacyEntry
	hooks   map[int]int    // hooks by the offset of a base chain's first rule
	starts  map[int]string // chains by the offset of their first rule
	opens   map[int]bool   // offsets of entries that open a user chain or end the table
}

// split finds the entries and where chains start.
func (p *legacyParser) split() error {
	l := p.layout
	for off := 0; off < len(p.blob); {
		if off+l.size > len(p.blob) {
			return blobError(off, "short header")
		}
		b := p.blob[off:]
		to := int(binary.NativeEndian.Uint16(b[l.targetOff:]))
		next := int(binary.NativeEndian.Uint16(b[l.targetOff+2:]))
		if to < l.size || to+xtHeaderLen > next || off+next > len(p.blob) {
			return blobError(off, "offsets out of range")
		}
		if CString(b[to+2:to+31]) == "ERROR" {
			p.opens[off] = true
			if off+next < len(p.blob) {
				p.starts[off+next] = CString(b[to+xtHeaderLen : next])
			}
		}
		p.entries = append(p.entries, legacyEntry{off, to, next})
		off += next
	}
	return nil
}

// chains adds the chains with their rules to t.
func (p *legacyParser) chains(t *Table) error {
	var cur *Chain
	for _, e := range p.entries {
		if p.opens[e.off] {
			cur = nil
			continue
		}
		if name, ok := p.starts[e.off]; ok {
			cur = &Chain{Name: name, Hook: p.hook(e.off, name)}
			t.Chains = append(t.Chains, cur)
		}
		if cur == nil {
			return blobError(e.off, "rule outside of a chain")
		}
		raw, err := normalEntry(p.layout, p.blob[e.off:e.off+e.next], e.target, e.off, p.starts)
		if err != nil {
			return err
		}
		cur.Rules = append(cur.Rules, Rule{Raw: raw})
	}
	return nil
}

// hook returns the hook of the chain that starts at an offset, nil if it has none.
func (p *legacyParser) hook(off int, name string) *Hook {
	h, ok := p.hooks[off]
	if !ok || legacyHooks[h] != name {
		return nil
	}
	priority := int32(-100)
	if name == "INPUT" || name == "POSTROUTING" {
		priority = 100
	}
	return &Hook{Num: uint32(h), Priority: priority, Type: "nat"}
}

// endChain removes a chain's last entry, which is its policy, or the return of a
// user chain.
func (p *legacyParser) endChain(c *Chain) {
	n := len(c.Rules)
	if n == 0 {
		return
	}
	if c.Hook != nil {
		if exprs, err := parseLegacyRule(p.v6, c.Rules[n-1].Raw); err == nil {
			if v, ok := exprs[len(exprs)-1].(StandardTarget); ok {
				c.Hook.Drop = v.Verdict.Code == VerdictDrop
			}
		}
	}
	c.Rules = c.Rules[:n-1]
}

// normalEntry returns entry b with counters and kernel state cleared and a
// standard target's verdict written as code and chain name.
func normalEntry(l *entryLayout, b []byte, to, off int, starts map[int]string) ([]byte, error) {
	raw := bytes.Clone(b)
	clear(raw[l.targetOff-4 : l.targetOff]) // nfcache
	clear(raw[l.targetOff+4 : l.size])      // comefrom, counters
	if name := CString(b[to+2 : to+31]); name != "" {
		return raw, nil
	}
	if len(b) < to+xtHeaderLen+4 {
		return nil, blobError(off, "short verdict")
	}
	v := int32(binary.NativeEndian.Uint32(b[to+xtHeaderLen:]))
	code, chain := int32(VerdictContinue), ""
	switch {
	case v == xtVerdictReturn:
		code = VerdictReturn
	case v < 0:
		code = -v - 1
	default:
		var ok bool
		if chain, ok = starts[int(v)]; ok {
			code = VerdictJump
			if b[l.flags]&l.fGoto != 0 {
				code = VerdictGoto
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
		return nil, fmt.Errorf("%w: rule of %d bytes", ErrMalformedTable, len(raw))
	}
	to := int(binary.NativeEndian.Uint16(raw[l.targetOff:]))
	if to < l.size || to+xtHeaderLen > len(raw) {
		return nil, fmt.Errorf("%w: target at %d of %d", ErrMalformedTable, to, len(raw))
	}
	h := Header{
		V6:      v6,
		Src:     raw[l.src : l.src+l.addrLen],
		Dst:     raw[l.dst : l.dst+l.addrLen],
		SrcMask: raw[l.sm : l.sm+l.addrLen],
		DstMask: raw[l.dm : l.dm+l.addrLen],
		In:      ifacePattern(raw[l.iif:l.iif+16], raw[l.iifm:l.iifm+16]),
		Out:     ifacePattern(raw[l.oif:l.oif+16], raw[l.oifm:l.oifm+16]),
		Proto:   binary.NativeEndian.Uint16(raw[l.proto:]),
		Invert:  raw[l.invert],
	}
	out := []any{h}
	if l.fFrag != 0 && raw[l.flags]&l.fFrag != 0 && h.Invert&invFrag == 0 {
		out = append(out, Other{"-f"})
	}
	for off := l.size; off < to; {
		if off+xtHeaderLen > to {
			return nil, fmt.Errorf("%w: short match", ErrMalformedTable)
		}
		n := int(binary.NativeEndian.Uint16(raw[off:]))
		if n < xtHeaderLen || off+n > to {
			return nil, fmt.Errorf("%w: match of %d bytes", ErrMalformedTable, n)
		}
		out = append(out, Match{Name: CString(raw[off+2 : off+31]), Revision: raw[off+31], Info: raw[off+xtHeaderLen : off+n]})
		off += n
	}
	name, info := CString(raw[to+2:to+31]), raw[to+xtHeaderLen:]
	if name != "" {
		return append(out, Target{Name: name, Revision: raw[to+31], Info: info}), nil
	}
	if len(info) < 4 {
		return nil, fmt.Errorf("%w: short verdict", ErrMalformedTable)
	}
	v := Verdict{Code: int32(binary.NativeEndian.Uint32(info)), Chain: string(info[4:])}
	if v.Code == VerdictContinue {
		return out, nil
	}
	return append(out, StandardTarget{v}), nil
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
	s := CString(name)
	if len(s) < n {
		return s
	}
	return s[:n] + "*"
}

// Flags of nat ranges (linux/netfilter/nf_nat.h).
const (
	natMapIPs     = 1 << 0
	natProtoSet   = 1 << 1
	NATRandom     = 1<<2 | 1<<4 // any port of a range: random, fully random
	natProtoShift = 1 << 5
	NATNetmap     = 1 << 6
)
