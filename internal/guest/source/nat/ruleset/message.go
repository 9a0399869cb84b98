// SPDX-License-Identifier: Apache-2.0

package ruleset

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
)

// Messages of nfnetlink's nftables subsystem (linux/netfilter/nf_tables.h).
const (
	Subsystem = 10

	MsgNewTable  = 0
	MsgGetTable  = 1
	MsgDelTable  = 2
	MsgNewChain  = 3
	MsgGetChain  = 4
	MsgDelChain  = 5
	MsgNewRule   = 6
	MsgGetRule   = 7
	MsgDelRule   = 8
	MsgNewSet    = 9
	MsgGetSet    = 10
	MsgDelSet    = 11
	MsgNewElem   = 12
	MsgGetElem   = 13
	MsgDelElem   = 14
	MsgNewGen    = 15
	MsgGetGen    = 16
	nlmCreate    = 0x400 // NLM_F_CREATE
	NLMAppend    = 0x800 // NLM_F_APPEND
	nfgenmsgLen  = 4
	TableDormant = 1
	tableOwner   = 2
	tablePersist = 4
)

// Since Linux 6.3 objects may also be destroyed, which is to delete what may not
// be there, and notified as such.
var (
	destroys = [...]uint8{26, 27, 28, 29, 30} // NFT_MSG_DESTROYTABLE to NFT_MSG_DESTROYSETELEM
	deletes  = [...]uint8{MsgDelTable, MsgDelChain, MsgDelRule, MsgDelSet, MsgDelElem}
)

var errMessage = errors.New("malformed nftables message")

// Message is a message of nftables, of a dump or a notification.
type Message struct {
	Type   uint8
	Append bool // NLM_F_APPEND
	Create bool // NLM_F_CREATE: a new rule that replaces none
	Table  TableID
	Chain  string
	Hook   *Hook
	Flags  uint32 // of a table

	Handle   uint64 // of a rule, a table or a chain
	Position uint64 // handle of the rule before it, 0 if unknown
	Raw      []byte // normal form of the rule's expressions

	Set      *Set
	Elements []Element

	Generation uint32
}

// ParseMessage decodes the payload of a message of type typ (low byte of the
// header's type). The result owns its bytes. A message that does not concern the
// nat ruleset has table.family 0.
func ParseMessage(typ uint8, flags uint16, b []byte) (*Message, error) {
	if len(b) < nfgenmsgLen {
		return nil, fmt.Errorf("%w: %d bytes", errMessage, len(b))
	}
	if i := slices.Index(destroys[:], typ); i >= 0 {
		typ = deletes[i]
	}
	m := &Message{Type: typ, Append: flags&NLMAppend != 0, Create: flags&nlmCreate != 0}
	family := b[0]
	b = b[nfgenmsgLen:]
	if typ == MsgNewGen {
		err := eachAttr(b, func(typ uint16, v []byte) error {
			if typ == 1 {
				if len(v) < 4 {
					return errMessage
				}
				m.Generation = be32(v)
			}
			return nil
		})
		return m, err
	}
	if family != FamilyInet && family != FamilyIP && family != FamilyIP6 {
		return m, nil
	}
	if typ > MsgDelElem {
		return m, nil // named objects and flow tables decide nothing
	}
	m.Table.Family = family
	if err := m.parse(b); err != nil {
		return nil, fmt.Errorf("message %d: %w", typ, err)
	}
	return m, nil
}

// parse decodes the attributes of an object of the nat ruleset.
func (m *Message) parse(b []byte) error {
	switch m.Type {
	case MsgNewTable, MsgDelTable:
		return m.parseTable(b)
	case MsgNewChain, MsgDelChain:
		return m.parseChain(b)
	case MsgNewRule, MsgDelRule:
		return m.parseRule(b)
	case MsgNewSet, MsgDelSet:
		return m.parseSet(b)
	case MsgNewElem, MsgDelElem:
		return m.parseElements(b)
	}
	return nil
}

func (m *Message) parseTable(b []byte) error {
	return eachAttr(b, func(typ uint16, v []byte) error {
		switch typ {
		case 1:
			m.Table.Name = CString(v)
		case 2:
			m.Flags = be32(v)
		case 4:
			m.Handle = be64(v)
		}
		return nil
	})
}

func (m *Message) parseRule(b []byte) error {
	return eachAttr(b, func(typ uint16, v []byte) (err error) {
		switch typ {
		case 1:
			m.Table.Name = CString(v)
		case 2:
			m.Chain = CString(v)
		case 3:
			m.Handle = be64(v)
		case 4:
			m.Raw, err = NormalExprs(v)
		case 6:
			m.Position = be64(v)
		}
		return err
	})
}

func (m *Message) parseSet(b []byte) error {
	m.Set = &Set{Elements: make(map[string]Element)}
	return eachAttr(b, func(typ uint16, v []byte) error {
		switch typ {
		case 1:
			m.Table.Name = CString(v)
		case 2:
			m.Set.Name = CString(v)
		case 3:
			m.Set.Flags = be32(v)
		case 5:
			m.Set.KeyLen = int(min(be32(v), 64))
		case 6:
			m.Set.DataType = be32(v)
		case 7:
			m.Set.DataLen = int(min(be32(v), 64))
		case 16:
			m.Set.Handle = be64(v)
		}
		return nil
	})
}

func (m *Message) parseElements(b []byte) error {
	m.Set = &Set{}
	return eachAttr(b, func(typ uint16, v []byte) error {
		switch typ {
		case 1:
			m.Table.Name = CString(v)
		case 2:
			m.Set.Name = CString(v)
		case 3:
			return eachAttr(v, func(_ uint16, v []byte) error {
				e, err := parseElement(v)
				m.Elements = append(m.Elements, e)
				return err
			})
		}
		return nil
	})
}

// Owned reports whether a table is removed when the program that made it closes its socket.
func (m *Message) Owned() bool { return m.Flags&(tableOwner|tablePersist) == tableOwner }

func (m *Message) parseChain(b []byte) error {
	var hook []byte
	h := &Hook{}
	err := eachAttr(b, func(typ uint16, v []byte) error {
		switch typ {
		case 1:
			m.Table.Name = CString(v)
		case 2:
			m.Handle = be64(v)
		case 3:
			m.Chain = CString(v)
		case 4:
			hook = v
		case 5:
			h.Drop = be32(v) == VerdictDrop
		case 7:
			h.Type = CString(v)
		}
		return nil
	})
	if err != nil || hook == nil {
		return err
	}
	m.Hook = h
	return eachAttr(hook, func(typ uint16, v []byte) error {
		switch typ {
		case 1:
			h.Num = be32(v)
		case 2:
			h.Priority = int32(be32(v))
		}
		return nil
	})
}

func parseElement(b []byte) (Element, error) {
	var e Element
	err := eachAttr(b, func(typ uint16, v []byte) error {
		var err error
		switch typ {
		case 1:
			var d []byte
			d, _, err = parseData(v)
			e.Key = bytes.Clone(d)
		case 2:
			var d []byte
			d, e.Verdict, err = parseData(v)
			e.Data = bytes.Clone(d)
		case 3:
			e.Flags = be32(v)
		case 4, 5:
			e.Expires = true
		case 10:
			var d []byte
			d, _, err = parseData(v)
			e.End = bytes.Clone(d)
		}
		return err
	})
	return e, err
}

// NormalExprs copies a rule's expressions without what packets change: the
// numbers of counters, quotas and the like.
func NormalExprs(b []byte) ([]byte, error) {
	out := make([]byte, 0, len(b))
	err := eachAttr(b, func(typ uint16, v []byte) error {
		if typ != AttrListElem {
			return nil
		}
		name, full := "", v
		if err := eachAttr(v, func(typ uint16, v []byte) error {
			if typ == AttrExprName {
				name = CString(v)
			}
			return nil
		}); err != nil {
			return err
		}
		switch name {
		case "counter", "last":
			return nil
		case "quota", "limit", "connlimit":
			full = AppendAttr(nil, AttrExprName, append([]byte(name), 0))
		}
		out = AppendAttr(out, AttrListElem, full)
		return nil
	})
	return out, err
}

// AppendAttr appends one netlink attribute.
func AppendAttr(b []byte, typ uint16, v []byte) []byte {
	b = binary.NativeEndian.AppendUint16(b, uint16(4+len(v)))
	b = binary.NativeEndian.AppendUint16(b, typ)
	b = append(b, v...)
	for len(b)%4 != 0 {
		b = append(b, 0)
	}
	return b
}
