// SPDX-License-Identifier: Apache-2.0

package nat

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
)

// Messages of nfnetlink's nftables subsystem (linux/netfilter/nf_tables.h).
const (
	nftSubsys = 10

	msgNewTable   = 0
	msgGetTable   = 1
	msgDelTable   = 2
	msgNewChain   = 3
	msgGetChain   = 4
	msgDelChain   = 5
	msgNewRule    = 6
	msgGetRule    = 7
	msgDelRule    = 8
	msgNewSet     = 9
	msgGetSet     = 10
	msgDelSet     = 11
	msgNewElem    = 12
	msgGetElem    = 13
	msgDelElem    = 14
	msgNewGen     = 15
	msgGetGen     = 16
	msgNewObj     = 18
	msgDelObj     = 20
	msgNewFlow    = 22
	msgDelFlow    = 24
	nlmCreate     = 0x400 // NLM_F_CREATE
	nlmAppend     = 0x800 // NLM_F_APPEND
	nfgenmsgLen   = 4
	tableDormant  = 1
	tableOwner    = 2
	tablePersist  = 4
	maxElemsBytes = 1 << 16
)

// Since Linux 6.3 objects may also be destroyed, which is to delete what may not
// be there, and notified as such.
var (
	destroys = [...]uint8{26, 27, 28, 29, 30} // NFT_MSG_DESTROYTABLE to NFT_MSG_DESTROYSETELEM
	deletes  = [...]uint8{msgDelTable, msgDelChain, msgDelRule, msgDelSet, msgDelElem}
)

var errMessage = errors.New("malformed nftables message")

// message is one nftables message: what a dump gives and what a notification says.
type message struct {
	typ    uint8
	append bool // NLM_F_APPEND
	create bool // NLM_F_CREATE: a new rule that replaces none
	bare   bool // as a hook tells it: the object's content is still to be asked for
	full   bool // set has all its elements
	table  tableID
	chain  string
	hook   *hookPoint
	flags  uint32 // of a table

	handle   uint64 // of a rule or a table
	position uint64 // handle of the rule before it, 0 if not said
	raw      []byte // normal form of the rule's expressions

	set   *nset
	elems []element

	gen uint32
}

// parseMessage decodes the payload of a message of type typ (low byte of the
// header's type). The result owns its bytes. A message that does not concern the
// nat ruleset has table.family 0.
func parseMessage(typ uint8, flags uint16, b []byte) (*message, error) {
	if len(b) < nfgenmsgLen {
		return nil, fmt.Errorf("%w: %d bytes", errMessage, len(b))
	}
	if i := slices.Index(destroys[:], typ); i >= 0 {
		typ = deletes[i]
	}
	m := &message{typ: typ, append: flags&nlmAppend != 0, create: flags&nlmCreate != 0}
	family := b[0]
	b = b[nfgenmsgLen:]
	if typ == msgNewGen {
		err := eachAttr(b, func(typ uint16, v []byte) error {
			if typ == 1 {
				if len(v) < 4 {
					return errMessage
				}
				m.gen = be32(v)
			}
			return nil
		})
		return m, err
	}
	if family != famInet && family != famIP && family != famIP6 {
		return m, nil
	}
	m.table.family = family
	var err error
	switch typ {
	case msgNewTable, msgDelTable:
		err = eachAttr(b, func(typ uint16, v []byte) error {
			switch typ {
			case 1:
				m.table.name = cstr(v)
			case 2:
				m.flags = be32(v)
			case 4:
				m.handle = be64(v)
			}
			return nil
		})
	case msgNewChain, msgDelChain:
		err = m.parseChain(b)
	case msgNewRule, msgDelRule:
		err = eachAttr(b, func(typ uint16, v []byte) error {
			switch typ {
			case 1:
				m.table.name = cstr(v)
			case 2:
				m.chain = cstr(v)
			case 3:
				m.handle = be64(v)
			case 4:
				var err error
				m.raw, err = normalExprs(v)
				return err
			case 6:
				m.position = be64(v)
			}
			return nil
		})
	case msgNewSet, msgDelSet:
		m.set = &nset{elems: make(map[string]element)}
		err = eachAttr(b, func(typ uint16, v []byte) error {
			switch typ {
			case 1:
				m.table.name = cstr(v)
			case 2:
				m.set.name = cstr(v)
			case 3:
				m.set.flags = be32(v)
			case 5:
				m.set.keyLen = int(min(be32(v), 64))
			case 6:
				m.set.dataType = be32(v)
			case 7:
				m.set.dataLen = int(min(be32(v), 64))
			case 16:
				m.set.handle = be64(v)
			}
			return nil
		})
	case msgNewElem, msgDelElem:
		m.set = &nset{}
		err = eachAttr(b, func(typ uint16, v []byte) error {
			switch typ {
			case 1:
				m.table.name = cstr(v)
			case 2:
				m.set.name = cstr(v)
			case 3:
				return eachAttr(v, func(_ uint16, v []byte) error {
					e, err := parseElement(v)
					m.elems = append(m.elems, e)
					return err
				})
			}
			return nil
		})
	}
	if err != nil {
		return nil, fmt.Errorf("message %d: %w", typ, err)
	}
	return m, nil
}

// owned tells of a table that it goes with the socket of the program that made it.
func (m *message) owned() bool { return m.flags&(tableOwner|tablePersist) == tableOwner }

func (m *message) parseChain(b []byte) error {
	var hook []byte
	h := &hookPoint{}
	err := eachAttr(b, func(typ uint16, v []byte) error {
		switch typ {
		case 1:
			m.table.name = cstr(v)
		case 3:
			m.chain = cstr(v)
		case 4:
			hook = v
		case 5:
			h.drop = be32(v) == vDrop
		case 7:
			h.typ = cstr(v)
		}
		return nil
	})
	if err != nil || hook == nil {
		return err
	}
	m.hook = h
	return eachAttr(hook, func(typ uint16, v []byte) error {
		switch typ {
		case 1:
			h.num = be32(v)
		case 2:
			h.prio = int32(be32(v))
		}
		return nil
	})
}

func parseElement(b []byte) (element, error) {
	var e element
	err := eachAttr(b, func(typ uint16, v []byte) error {
		var err error
		switch typ {
		case 1:
			var d []byte
			d, _, err = parseData(v)
			e.key = bytes.Clone(d)
		case 2:
			var d []byte
			d, e.verdict, err = parseData(v)
			e.data = bytes.Clone(d)
		case 3:
			e.flags = be32(v)
		case 4, 5:
			e.expires = true
		case 10:
			var d []byte
			d, _, err = parseData(v)
			e.end = bytes.Clone(d)
		}
		return err
	})
	return e, err
}

// normalExprs copies a rule's expressions without what packets change: the
// numbers of counters, quotas and the like.
func normalExprs(b []byte) ([]byte, error) {
	out := make([]byte, 0, len(b))
	err := eachAttr(b, func(typ uint16, v []byte) error {
		if typ != attrListElem {
			return nil
		}
		name, full := "", v
		if err := eachAttr(v, func(typ uint16, v []byte) error {
			if typ == attrExprName {
				name = cstr(v)
			}
			return nil
		}); err != nil {
			return err
		}
		switch name {
		case "counter", "last":
			return nil
		case "quota", "limit", "connlimit":
			full = appendAttr(nil, attrExprName, append([]byte(name), 0))
		}
		out = appendAttr(out, attrListElem, full)
		return nil
	})
	return out, err
}

// appendAttr appends one netlink attribute.
func appendAttr(b []byte, typ uint16, v []byte) []byte {
	b = binary.NativeEndian.AppendUint16(b, uint16(4+len(v)))
	b = binary.NativeEndian.AppendUint16(b, typ)
	b = append(b, v...)
	for len(b)%4 != 0 {
		b = append(b, 0)
	}
	return b
}
