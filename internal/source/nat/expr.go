// SPDX-License-Identifier: Apache-2.0

package nat

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
)

// Expressions of a rule. Legacy rules are read into the same kinds: their header
// is an exprHeader, their matches and target are exprMatch and exprTarget.
type (
	exprImmediate struct {
		dreg    uint32
		data    []byte
		verdict *verdict
	}
	exprCmp struct {
		sreg, op uint32
		data     []byte
	}
	exprRange struct {
		sreg, op uint32
		from, to []byte
	}
	exprPayload struct{ dreg, base, offset, length, sreg uint32 }
	exprMeta    struct{ dreg, key, sreg uint32 }
	exprCt      struct {
		dreg, key, sreg uint32
		dir             int // -1 when not given
	}
	exprFib     struct{ dreg, result, flags uint32 }
	exprBitwise struct {
		sreg, dreg, length, op uint32
		mask, xor              []byte
	}
	exprByteorder struct{ sreg, dreg, length, size uint32 }
	exprLookup    struct {
		set        string
		sreg, dreg uint32
		hasDreg    bool
		invert     bool
	}
	exprNumgen struct {
		dreg, modulus, offset uint32
		what                  string
	}
	exprNat struct {
		kind, family                         uint32
		addrMin, addrMax, protoMin, protoMax uint32 // registers, 0: none
		flags                                uint32
	}
	exprRedir struct{ protoMin, protoMax, flags uint32 }
	// exprPass neither limits nor decides: counter, log and the like.
	exprPass struct{ name string }
	// exprOther is an expression that is not understood.
	exprOther struct{ name string }

	exprMatch struct {
		name string
		rev  uint8
		info []byte
	}
	exprTarget struct {
		name string
		rev  uint8
		info []byte
	}
	exprHeader struct {
		v6           bool
		src, dst     []byte
		smask, dmask []byte
		iif, oif     string // "" any, "x*" prefix
		proto        uint16
		invert       uint8
	}
	exprVerdict struct{ verdict verdict }
)

// Netlink attributes of expressions (linux/netfilter/nf_tables.h).
const (
	attrListElem = 1 // NFTA_LIST_ELEM

	attrExprName = 1
	attrExprData = 2

	attrDataValue   = 1
	attrDataVerdict = 2

	attrVerdictCode  = 1
	attrVerdictChain = 2
)

// Operators of a comparison (NFT_CMP_*).
const (
	cmpEq, cmpNeq, cmpLt, cmpLte, cmpGt, cmpGte = 0, 1, 2, 3, 4, 5
)

// Meta and ct keys (linux/netfilter/nf_tables.h).
const (
	metaProtocol = 1
	metaMark     = 3
	metaIif      = 4
	metaOif      = 5
	metaIifname  = 6
	metaOifname  = 7
	metaNfproto  = 15
	metaL4proto  = 16

	ctKeyState    = 0
	ctKeyDst      = 8
	ctKeyProtocol = 10
	ctKeyProtoDst = 12
	ctKeyDstIP    = 19
	ctKeyDstIP6   = 21

	fibAddrtype = 3
	fibSaddr    = 1
	fibDaddr    = 2

	rtnLocal = 2
)

var metaNames = map[uint32]string{
	0: "meta length", 1: "meta protocol", 2: "meta priority", 3: "meta mark", 4: "iif", 5: "oif", 6: "iifname",
	7: "oifname", 8: "iiftype", 9: "oiftype", 10: "meta skuid", 11: "meta skgid", 13: "rtclassid", 15: "meta nfproto",
	16: "meta l4proto", 19: "meta pkttype", 20: "meta cpu", 21: "iifgroup", 22: "oifgroup", 23: "meta cgroup",
	24: "meta random", 30: "meta time", 31: "meta day", 32: "meta hour",
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

// cstr returns the bytes before the first NUL as a string.
func cstr(v []byte) string {
	if i := bytes.IndexByte(v, 0); i >= 0 {
		v = v[:i]
	}
	return string(v)
}

func parseData(b []byte) (data []byte, v *verdict, err error) {
	err = eachAttr(b, func(typ uint16, val []byte) error {
		switch typ {
		case attrDataValue:
			data = val
		case attrDataVerdict:
			v = &verdict{}
			return eachAttr(val, func(typ uint16, val []byte) error {
				switch typ {
				case attrVerdictCode:
					v.code = int32(be32(val))
				case attrVerdictChain:
					v.chain = cstr(val)
				}
				return nil
			})
		}
		return nil
	})
	return data, v, err
}

// parseExprs decodes NFTA_RULE_EXPRESSIONS. What it does not know becomes an
// exprOther; an error means that the bytes are no attributes at all.
func parseExprs(b []byte) ([]any, error) {
	var out []any
	err := eachAttr(b, func(typ uint16, v []byte) error {
		if typ != attrListElem {
			return nil
		}
		var name string
		var data []byte
		if err := eachAttr(v, func(typ uint16, v []byte) error {
			switch typ {
			case attrExprName:
				name = cstr(v)
			case attrExprData:
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

func parseExpr(name string, b []byte) (any, error) {
	// dataOf reads nested NFTA_DATA_* attributes.
	dataOf := func(want uint16, dst *[]byte, v **verdict) func(uint16, []byte) error {
		return func(typ uint16, val []byte) error {
			if typ != want {
				return nil
			}
			d, verd, err := parseData(val)
			*dst = d
			if v != nil {
				*v = verd
			}
			return err
		}
	}
	switch name {
	case "immediate":
		var e exprImmediate
		n, err := readNums(b, dataOf(2, &e.data, &e.verdict))
		e.dreg = n[1]
		return e, err
	case "cmp":
		var e exprCmp
		n, err := readNums(b, dataOf(3, &e.data, nil))
		e.sreg, e.op = n[1], n[2]
		return e, err
	case "range":
		var e exprRange
		n, err := readNums(b, func(typ uint16, v []byte) error {
			if err := dataOf(3, &e.from, nil)(typ, v); err != nil {
				return err
			}
			return dataOf(4, &e.to, nil)(typ, v)
		})
		e.sreg, e.op = n[1], n[2]
		return e, err
	case "payload":
		n, err := readNums(b, nil)
		return exprPayload{dreg: n[1], base: n[2], offset: n[3], length: n[4], sreg: n[5]}, err
	case "meta":
		n, err := readNums(b, nil)
		return exprMeta{dreg: n[1], key: n[2], sreg: n[3]}, err
	case "ct":
		e := exprCt{dir: -1}
		n, err := readNums(b, func(typ uint16, v []byte) error {
			if typ == 3 && len(v) == 1 {
				e.dir = int(v[0])
			}
			return nil
		})
		e.dreg, e.key, e.sreg = n[1], n[2], n[4]
		return e, err
	case "fib":
		n, err := readNums(b, nil)
		return exprFib{dreg: n[1], result: n[2], flags: n[3]}, err
	case "bitwise":
		var e exprBitwise
		n, err := readNums(b, func(typ uint16, v []byte) error {
			if err := dataOf(4, &e.mask, nil)(typ, v); err != nil {
				return err
			}
			return dataOf(5, &e.xor, nil)(typ, v)
		})
		e.sreg, e.dreg, e.length, e.op = n[1], n[2], n[3], n[6]
		return e, err
	case "byteorder":
		n, err := readNums(b, nil)
		return exprByteorder{sreg: n[1], dreg: n[2], length: n[4], size: n[5]}, err
	case "lookup":
		var e exprLookup
		n, err := readNums(b, func(typ uint16, v []byte) error {
			switch typ {
			case 1:
				e.set = cstr(v)
			case 3:
				e.hasDreg = true
			}
			return nil
		})
		e.sreg, e.dreg, e.invert = n[2], n[3], n[5]&1 != 0
		return e, err
	case "numgen":
		n, err := readNums(b, nil)
		what := "inc"
		if n[3] == 1 {
			what = "random"
		}
		return exprNumgen{dreg: n[1], modulus: n[2], offset: n[4], what: "numgen " + what}, err
	case "hash":
		n, err := readNums(b, nil)
		return exprNumgen{dreg: n[2], modulus: n[4], offset: n[6], what: "hash"}, err
	case "nat":
		n, err := readNums(b, nil)
		return exprNat{kind: n[1], family: n[2], addrMin: n[3], addrMax: n[4], protoMin: n[5], protoMax: n[6], flags: n[7]}, err
	case "redir":
		n, err := readNums(b, nil)
		return exprRedir{protoMin: n[1], protoMax: n[2], flags: n[3]}, err
	case "match", "target":
		var nm string
		var info []byte
		n, err := readNums(b, func(typ uint16, v []byte) error {
			switch typ {
			case 1:
				nm = cstr(v)
			case 3:
				info = v
			}
			return nil
		})
		if name == "match" {
			return exprMatch{name: nm, rev: uint8(n[2]), info: info}, err
		}
		return exprTarget{name: nm, rev: uint8(n[2]), info: info}, err
	case "counter", "log", "notrack", "last", "dup":
		return exprPass{name}, nil
	}
	return exprOther{name}, nil
}

// regIndex maps NFT_REG_1..4 (16 bytes) and NFT_REG32_00..15 to a four-byte index.
func regIndex(r uint32) (int, bool) {
	switch {
	case r >= 1 && r <= 4:
		return int(r-1) * 4, true
	case r >= 8 && r <= 23:
		return int(r - 8), true
	}
	return 0, false
}
