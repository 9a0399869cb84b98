// SPDX-License-Identifier: Apache-2.0

package ruleset

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
)

// Expressions of nftables rules. Registers are numbered as nftables does, see
// RegIndex; Sreg is read and Dreg is written.
type (
	// Immediate loads a constant, or ends the rule with a verdict.
	Immediate struct {
		Dreg    uint32
		Data    []byte
		Verdict *Verdict
	}
	// Cmp compares a register with a constant.
	Cmp struct {
		Sreg, Op uint32
		Data     []byte
	}
	// Range compares a register with two constants.
	Range struct {
		Sreg, Op uint32
		From, To []byte
	}
	// Payload loads from a header of the packet, or writes to it.
	Payload struct{ Dreg, Base, Offset, Length, Sreg uint32 }
	// Meta loads a property of the packet, or sets it.
	Meta struct{ Dreg, Key, Sreg uint32 }
	// Ct loads a property of the connection, or sets it.
	Ct struct {
		Dreg, Key, Sreg uint32
		Dir             int // -1 when not given
	}
	// Fib loads the result of a routing lookup.
	Fib struct{ Dreg, Result, Flags uint32 }
	// Bitwise masks a register.
	Bitwise struct {
		Sreg, Dreg, Length, Op uint32
		Mask, Xor              []byte
	}
	// Byteorder swaps the bytes of a register.
	Byteorder struct{ Sreg, Dreg, Length, Size uint32 }
	// Lookup looks a register up in a set or map.
	Lookup struct {
		Set        string
		Sreg, Dreg uint32
		HasDreg    bool
		Invert     bool
	}
	// Numgen loads a counter, a random number or a hash, below a modulus.
	Numgen struct {
		Dreg, Modulus, Offset uint32
		What                  string
	}
	// NAT changes the source or the destination.
	NAT struct {
		Kind, Family                         uint32
		AddrMin, AddrMax, ProtoMin, ProtoMax uint32 // registers, 0: none
		Flags                                uint32
	}
	// Redirect changes the destination to this machine.
	Redirect struct{ ProtoMin, ProtoMax, Flags uint32 }
	// Dynset adds an element to a set, or updates one. Conditional says that
	// whether the rule goes on depends on the element.
	Dynset struct {
		Set         string
		Conditional bool
	}
	// Pass neither limits nor decides: counter, log and the like.
	Pass struct{ Name string }
	// Other is an expression that is not understood.
	Other struct{ Name string }
)

// Parts of x_tables rules. A legacy rule has a header, any number of matches and a
// target; nftables rules that iptables-nft wrote have matches and targets among
// their expressions.
type (
	// Match is a match with its binary data, see Decode.
	Match struct {
		Name     string
		Revision uint8
		Info     []byte
	}
	// Target is a target with its binary data, see DecodeNAT.
	Target struct {
		Name     string
		Revision uint8
		Info     []byte
	}
	// Header is the common part of a legacy rule.
	Header struct {
		V6               bool
		Src, Dst         []byte
		SrcMask, DstMask []byte
		In, Out          string // interfaces; "" is any, "x*" is a prefix
		Proto            uint16
		Invert           uint8
	}
	// StandardTarget is a target that is a verdict.
	StandardTarget struct{ Verdict Verdict }
)

// Netlink attributes of expressions (linux/netfilter/nf_tables.h).
const (
	AttrListElem = 1 // NFTA_LIST_ELEM

	AttrExprName = 1
	AttrExprData = 2

	AttrDataValue   = 1
	AttrDataVerdict = 2

	AttrVerdictCode  = 1
	AttrVerdictChain = 2
)

// Headers that Payload loads from (NFT_PAYLOAD_*).
const (
	PayloadLink      = 0
	PayloadNetwork   = 1
	PayloadTransport = 2
)

// Operators of a comparison (NFT_CMP_*).
const (
	CmpEq  = 0
	CmpNeq = 1
	CmpLt  = 2
	CmpLte = 3
	CmpGt  = 4
	CmpGte = 5
)

// Meta and ct keys (linux/netfilter/nf_tables.h).
const (
	MetaProtocol = 1
	MetaMark     = 3
	MetaIif      = 4
	MetaOif      = 5
	MetaIifname  = 6
	MetaOifname  = 7
	MetaNfproto  = 15
	MetaL4proto  = 16

	CtKeyState    = 0
	CtKeySrc      = 8
	CtKeyDst      = 9
	CtKeyProtocol = 10
	CtKeyProtoDst = 12
	CtKeySrcIP    = 19
	CtKeyDstIP    = 20
	CtKeySrcIP6   = 21
	CtKeyDstIP6   = 22

	FibAddrtype = 3
	FibSaddr    = 1
	FibDaddr    = 2

	// Types of addresses (linux/rtnetlink.h).
	RtnUnspec      = 0
	RtnUnicast     = 1
	RtnLocal       = 2
	RtnMulticast   = 5
	RtnUnreachable = 7
	RtnProhibit    = 8
)

// MetaNames are the names that nft gives to meta keys.
var MetaNames = map[uint32]string{
	0: "meta length", 1: "meta protocol", 2: "meta priority", 3: "meta mark", 4: "iif", 5: "oif", 6: "iifname",
	7: "oifname", 8: "iiftype", 9: "oiftype", 10: "meta skuid", 11: "meta skgid", 13: "rtclassid", 15: "meta nfproto",
	16: "meta l4proto", 19: "meta pkttype", 20: "meta cpu", 21: "iifgroup", 22: "oifgroup", 23: "meta cgroup",
	24: "meta random", 30: "meta time", 31: "meta day", 32: "meta hour",
}

// ctNames are the names that nft gives to ct keys.
var ctNames = map[uint32]string{
	CtKeyState: "state", CtKeySrc: "saddr", CtKeyDst: "daddr", CtKeyProtocol: "protocol", CtKeyProtoDst: "proto-dst",
	CtKeySrcIP: "ip saddr", CtKeyDstIP: "ip daddr", CtKeySrcIP6: "ip6 saddr", CtKeyDstIP6: "ip6 daddr",
}

// Name returns what nft calls the property of the connection.
func (e Ct) Name() string {
	name, ok := ctNames[e.Key]
	if !ok {
		name = fmt.Sprintf("key %d", e.Key)
	}
	return "ct " + map[int]string{0: "original ", 1: "reply "}[e.Dir] + name
}

var errAttr = errors.New("malformed netlink attribute")

// eachAttr calls f with each attribute of b, flags stripped from its type.
func eachAttr(b []byte, f func(typ uint16, v []byte) error) error {
	for len(b) >= 4 {
		l := int(binary.NativeEndian.Uint16(b))
		if l < 4 || l > len(b) {
			return errAttr
		}
		if err := f(binary.NativeEndian.Uint16(b[2:])&0x3fff, b[4:l]); err != nil {
			return err
		}
		b = b[min((l+3)&^3, len(b)):]
	}
	if len(b) != 0 && len(bytes.Trim(b, "\x00")) != 0 {
		return errAttr
	}
	return nil
}

func be32(v []byte) uint32 {
	if len(v) < 4 {
		return 0
	}
	return binary.BigEndian.Uint32(v)
}

func be64(v []byte) uint64 {
	if len(v) < 8 {
		return 0
	}
	return binary.BigEndian.Uint64(v)
}

// CString returns the bytes before the first NUL as a string.
func CString(v []byte) string {
	if i := bytes.IndexByte(v, 0); i >= 0 {
		v = v[:i]
	}
	return string(v)
}

func parseData(b []byte) (data []byte, v *Verdict, err error) {
	err = eachAttr(b, func(typ uint16, val []byte) error {
		switch typ {
		case AttrDataValue:
			data = val
		case AttrDataVerdict:
			v = &Verdict{}
			return eachAttr(val, func(typ uint16, val []byte) error {
				switch typ {
				case AttrVerdictCode:
					v.Code = int32(be32(val))
				case AttrVerdictChain:
					v.Chain = CString(val)
				}
				return nil
			})
		}
		return nil
	})
	return data, v, err
}

// ParseExprs decodes NFTA_RULE_EXPRESSIONS. What it does not know becomes an
// Other; an error means that the bytes are no attributes at all.
func ParseExprs(b []byte) ([]any, error) {
	var out []any
	err := eachAttr(b, func(typ uint16, v []byte) error {
		if typ != AttrListElem {
			return nil
		}
		var name string
		var data []byte
		if err := eachAttr(v, func(typ uint16, v []byte) error {
			switch typ {
			case AttrExprName:
				name = CString(v)
			case AttrExprData:
				data = v
			}
			return nil
		}); err != nil {
			return err
		}
		e, err := parseExpr(name, data)
		if err != nil {
			return fmt.Errorf("expression %q: %w", name, err)
		}
		out = append(out, e)
		return nil
	})
	return out, err
}

// ParseRule decodes the bytes of a rule of a table. What it does not know becomes
// an Other; an error means that the bytes are malformed.
func ParseRule(in TableID, raw []byte) ([]any, error) {
	if in.Legacy {
		return parseLegacyRule(in.Family == FamilyIP6, raw)
	}
	return ParseExprs(raw)
}

// SetsMark reports whether a rule of a table sets the packet mark. A rule that is
// malformed does not.
func SetsMark(in TableID, raw []byte) bool {
	if !bytes.Contains(raw, []byte("MARK\x00")) && (in.Legacy || !setsMetaMark(raw)) {
		return false
	}
	exprs, _ := ParseRule(in, raw)
	return slices.ContainsFunc(exprs, func(x any) bool {
		switch e := x.(type) {
		case Meta:
			return e.Sreg != 0 && e.Key == MetaMark
		case Target:
			return e.Name == "MARK" || e.Name == "CONNMARK" || e.Name == "HMARK"
		}
		return false
	})
}

// setsMetaMark reports whether an expression of a rule may set the packet mark. It
// is asked of every rule.
func setsMetaMark(exprs []byte) bool {
	found := false
	_ = eachAttr(exprs, func(_ uint16, elem []byte) error {
		meta := false
		return eachAttr(elem, func(typ uint16, v []byte) error {
			if typ == AttrExprName {
				meta = string(v) == "meta\x00"
			}
			if !meta || typ != AttrExprData {
				return nil
			}
			key, sets := uint32(0), false
			err := eachAttr(v, func(typ uint16, v []byte) error {
				switch typ {
				case 2:
					key = be32(v)
				case 3:
					sets = true
				}
				return nil
			})
			found = found || sets && key == MetaMark
			return err
		})
	})
	return found
}

// nums reads the 32-bit attributes of an expression and hands on the rest.
type nums [16]uint32

func readNums(b []byte, rest func(typ uint16, v []byte) error) (n nums, err error) {
	err = eachAttr(b, func(typ uint16, v []byte) error {
		if len(v) == 4 && int(typ) < len(n) {
			n[typ] = be32(v)
		}
		if rest != nil {
			return rest(typ, v)
		}
		return nil
	})
	return n, err
}

// parseExpr decodes the attributes of one expression. One that is not known is an
// Other.
func parseExpr(name string, b []byte) (any, error) {
	switch name {
	case "counter", "log", "notrack", "last", "dup", "masq":
		return Pass{name}, nil
	case "match", "target":
		return parseXtables(name, b)
	case "numgen", "hash":
		return parseNumgen(name, b)
	case "immediate", "cmp", "range", "bitwise":
		return parseConstant(name, b)
	case "objref":
		return parseObjref(b)
	case "dynset":
		return parseDynset(b)
	case "ct":
		return parseCt(b)
	case "lookup":
		return parseLookup(b)
	}
	n, err := readNums(b, nil)
	switch name {
	case "payload":
		return Payload{Dreg: n[1], Base: n[2], Offset: n[3], Length: n[4], Sreg: n[5]}, err
	case "meta":
		return Meta{Dreg: n[1], Key: n[2], Sreg: n[3]}, err
	case "fib":
		return Fib{Dreg: n[1], Result: n[2], Flags: n[3]}, err
	case "byteorder":
		return Byteorder{Sreg: n[1], Dreg: n[2], Length: n[4], Size: n[5]}, err
	case "nat":
		return NAT{Kind: n[1], Family: n[2], AddrMin: n[3], AddrMax: n[4], ProtoMin: n[5], ProtoMax: n[6], Flags: n[7]}, err
	case "redir":
		return Redirect{ProtoMin: n[1], ProtoMax: n[2], Flags: n[3]}, err
	}
	return Other{name}, nil
}

// parseConstant decodes an expression that holds constants: by attribute 2 to 5,
// which are numbers in other expressions.
func parseConstant(name string, b []byte) (any, error) {
	var data [6][]byte
	var v *Verdict
	first := map[string]uint16{"immediate": 2, "cmp": 3, "range": 3, "bitwise": 4}[name]
	n, err := readNums(b, func(typ uint16, val []byte) (err error) {
		if typ < first || int(typ) >= len(data) {
			return nil
		}
		var verdict *Verdict
		data[typ], verdict, err = parseData(val)
		if typ == first {
			v = verdict
		}
		return err
	})
	switch name {
	case "immediate":
		return Immediate{Dreg: n[1], Data: data[2], Verdict: v}, err
	case "cmp":
		return Cmp{Sreg: n[1], Op: n[2], Data: data[3]}, err
	case "range":
		return Range{Sreg: n[1], Op: n[2], From: data[3], To: data[4]}, err
	}
	return Bitwise{Sreg: n[1], Dreg: n[2], Length: n[3], Op: n[6], Mask: data[4], Xor: data[5]}, err
}

func parseCt(b []byte) (any, error) {
	e := Ct{Dir: -1}
	n, err := readNums(b, func(typ uint16, v []byte) error {
		if typ == 3 && len(v) == 1 {
			e.Dir = int(v[0])
		}
		return nil
	})
	e.Dreg, e.Key, e.Sreg = n[1], n[2], n[4]
	return e, err
}

func parseLookup(b []byte) (any, error) {
	var e Lookup
	n, err := readNums(b, func(typ uint16, v []byte) error {
		switch typ {
		case 1:
			e.Set = CString(v)
		case 3:
			e.HasDreg = true
		}
		return nil
	})
	e.Sreg, e.Dreg, e.Invert = n[2], n[3], n[5]&1 != 0
	return e, err
}

// Types of stateful objects that only note something (NFT_OBJECT_*): counter, ct
// helper, ct timeout, secmark, ct expect.
var passive = map[uint32]bool{1: true, 3: true, 7: true, 8: true, 9: true}

// Named objects that may limit, as an Other has them.
const (
	AnObject      = "a named object, such as a limit or a quota"
	AChosenObject = "an object that a map chooses"
)

// parseObjref decodes the use of a named object. One that a map chooses by a key
// of the packet (NFTA_OBJREF_SET_NAME) ends the rule where the key is not in it.
func parseObjref(b []byte) (any, error) {
	chosen := false
	n, err := readNums(b, func(typ uint16, _ []byte) error {
		chosen = chosen || typ == 4
		return nil
	})
	switch {
	case !chosen && passive[n[1]]:
		return Pass{"objref"}, err
	case chosen:
		return Other{AChosenObject}, err
	}
	return Other{AnObject}, err
}

// parseDynset decodes NFTA_DYNSET_*: 1 name, 7 and 10 expressions, 9 flags.
func parseDynset(b []byte) (any, error) {
	var e Dynset
	n, err := readNums(b, func(typ uint16, v []byte) error {
		switch typ {
		case 1:
			e.Set = CString(v)
		case 7, 10:
			e.Conditional = true
		}
		return nil
	})
	e.Conditional = e.Conditional || n[9]&1 != 0 // NFT_DYNSET_F_INV
	return e, err
}

func parseNumgen(name string, b []byte) (any, error) {
	n, err := readNums(b, nil)
	if name == "hash" {
		return Numgen{Dreg: n[2], Modulus: n[4], Offset: n[6], What: "hash"}, err
	}
	what := "numgen inc"
	if n[3] == 1 {
		what = "numgen random"
	}
	return Numgen{Dreg: n[1], Modulus: n[2], Offset: n[4], What: what}, err
}

func parseXtables(name string, b []byte) (any, error) {
	var m Match
	n, err := readNums(b, func(typ uint16, v []byte) error {
		switch typ {
		case 1:
			m.Name = CString(v)
		case 3:
			m.Info = v
		}
		return nil
	})
	m.Revision = uint8(n[2])
	if name == "target" {
		return Target(m), err
	}
	return m, err
}

// RegIndex maps NFT_REG_1..4 (16 bytes) and NFT_REG32_00..15 to a four-byte index.
func RegIndex(r uint32) (int, bool) {
	switch {
	case r >= 1 && r <= 4:
		return int(r-1) * 4, true
	case r >= 8 && r <= 23:
		return int(r - 8), true
	}
	return 0, false
}
