// SPDX-License-Identifier: Apache-2.0

package ruleset

import (
	"bytes"
	"cmp"
	"fmt"
	"slices"
)

// Protocol families of nftables (linux/netfilter.h, NFPROTO_*).
const (
	FamilyInet = 1
	FamilyIP   = 2
	FamilyIP6  = 10
)

// Netfilter hooks (linux/netfilter.h, NF_INET_*).
const (
	HookPrerouting = 0
	HookOutput     = 3
)

// TableID names a table. A legacy table and an nftables table of one name are two.
type TableID struct {
	Legacy bool
	Family uint8
	Name   string
}

func familyName(f uint8) string {
	switch f {
	case FamilyInet:
		return "inet"
	case FamilyIP:
		return "ip"
	case FamilyIP6:
		return "ip6"
	}
	return fmt.Sprintf("family-%d", f)
}

// String returns for example "ip nat" or "legacy ip6 nat".
func (t TableID) String() string {
	s := familyName(t.Family) + " " + t.Name
	if t.Legacy {
		s = "legacy " + s
	}
	return s
}

// ChainID names a chain.
type ChainID struct {
	Table TableID
	Name  string
}

// Compare orders by table and name.
func (c ChainID) Compare(d ChainID) int {
	return cmp.Or(cmp.Compare(c.Table.String(), d.Table.String()), cmp.Compare(c.Name, d.Name))
}

// Hook is where and when packets enter a base chain.
type Hook struct {
	Num      uint32
	Priority int32
	Type     string
	Drop     bool // the policy is to drop
}

// IsNAT reports whether h is a nat hook that changes destinations. A nil h is not.
func (h *Hook) IsNAT() bool {
	return h != nil && h.Type == "nat" && (h.Num == HookPrerouting || h.Num == HookOutput)
}

// Set is an nftables set or map.
type Set struct {
	Name     string
	Handle   uint64 // unique among the sets that had this name; 0 if unknown
	Flags    uint32
	KeyLen   int
	DataLen  int
	DataType uint32
	Elements map[string]Element // by id
	Blank    bool               // the elements were not read, because no nat hook leads here
}

// Changing reports whether packets change the elements.
func (n *Set) Changing() bool { return n.Flags&(setTimeout|setEval) != 0 }

// Concat reports whether the key is a concatenation.
func (n *Set) Concat() bool {
	if n.Flags&setConcat != 0 {
		return true
	}
	for _, e := range n.Elements {
		return e.End != nil // concatenated ranges carry NFTA_SET_ELEM_KEY_END
	}
	return false
}

// HasCatchall reports whether there is an element for all keys without one of their own.
func (n *Set) HasCatchall() bool {
	_, ok := n.Elements[Element{Flags: ElemCatchall}.ID()]
	return ok
}

// Element is an element of a set or map. Its key is nil if it is the catch-all.
type Element struct {
	Key, End []byte
	Data     []byte // value of a map
	Verdict  *Verdict
	Flags    uint32
	Expires  bool
}

// ID identifies an element within its set.
func (e Element) ID() string {
	return fmt.Sprintf("%x/%x/%d", e.Key, e.End, e.Flags&ElemIntervalEnd)
}

// KeyEnd returns the last key that the element is for.
func (e Element) KeyEnd() []byte {
	if e.End != nil {
		return e.End
	}
	return e.Key
}

// Equal reports whether e and f are the same element with the same content.
func (e Element) Equal(f Element) bool {
	if (e.Verdict == nil) != (f.Verdict == nil) || e.Verdict != nil && *e.Verdict != *f.Verdict {
		return false
	}
	return bytes.Equal(e.Key, f.Key) && bytes.Equal(e.End, f.End) && bytes.Equal(e.Data, f.Data) &&
		e.Flags == f.Flags && e.Expires == f.Expires
}

// Set and element flags (linux/netfilter/nf_tables.h).
const (
	SetInterval = 0x4
	SetMap      = 0x8
	setTimeout  = 0x10
	setEval     = 0x20
	setConcat   = 0x80

	ElemIntervalEnd = 1
	ElemCatchall    = 2
)

// VerdictDataType is the data type of a verdict map (NFT_DATA_VERDICT).
const VerdictDataType = 0xffffff00

// Verdict is where a packet goes next.
type Verdict struct {
	Code  int32
	Chain string
}

// Verdict codes (linux/netfilter.h, linux/netfilter/nf_tables.h).
const (
	VerdictDrop     = 0
	VerdictAccept   = 1
	VerdictContinue = -1
	VerdictBreak    = -2
	VerdictJump     = -3
	VerdictGoto     = -4
	VerdictReturn   = -5
)

// Snapshot is a ruleset at one time. It holds the tables with a base chain at a
// nat hook.
type Snapshot struct {
	Generation uint32 // nftables generation; 0 in a legacy snapshot
	Tables     []*Table
	Others     []TableID // the other tables
}

// Table is a table of a snapshot.
type Table struct {
	ID      TableID
	Handle  uint64
	Dormant bool
	Owned   bool // removed when the program that made it closes its socket
	Chains  []*Chain
	Sets    []*Set
}

// Chain is a chain of a snapshot.
type Chain struct {
	Name   string
	Handle uint64 // rises with each chain that is made in a table; 0 in legacy tables
	Hook   *Hook  // nil if it is not a base chain
	Rules  []Rule
}

// Rule is a rule of a snapshot.
type Rule struct {
	Handle uint64 // 0 in legacy tables
	Raw    []byte // see ParseRule; equal bytes mean an equal rule
}

// IsNAT reports whether a chain of the table is at a nat hook.
func (s *Table) IsNAT() bool {
	return slices.ContainsFunc(s.Chains, func(c *Chain) bool { return c.Hook.IsNAT() })
}
