// SPDX-License-Identifier: Apache-2.0

package nat

import (
	"bytes"
	"fmt"
	"slices"
)

// Protocol families of nftables (linux/netfilter.h, NFPROTO_*).
const (
	famInet = 1
	famIP   = 2
	famIP6  = 10
)

// Netfilter hooks (linux/netfilter.h, NF_INET_*).
const (
	hookPrerouting = 0
	hookOutput     = 3
)

// tableID names a table. A legacy table and an nftables table of one name are two.
type tableID struct {
	legacy bool
	family uint8
	name   string
}

func familyName(f uint8) string {
	switch f {
	case famInet:
		return "inet"
	case famIP:
		return "ip"
	case famIP6:
		return "ip6"
	}
	return fmt.Sprintf("family-%d", f)
}

// String returns for example "ip nat" or "legacy ip6 nat".
func (t tableID) String() string {
	s := familyName(t.family) + " " + t.name
	if t.legacy {
		s = "legacy " + s
	}
	return s
}

// chainID names a chain.
type chainID struct {
	table tableID
	name  string
}

// hookPoint is where a base chain hangs.
type hookPoint struct {
	num  uint32
	prio int32
	typ  string
	drop bool // policy
}

func (h *hookPoint) nat() bool {
	return h != nil && h.typ == "nat" && (h.num == hookPrerouting || h.num == hookOutput)
}

// nset is an nftables set or map.
type nset struct {
	name     string
	handle   uint64 // another for each set of one name, 0 if unknown
	flags    uint32
	keyLen   int
	dataLen  int
	dataType uint32
	elems    map[string]element // by id
	blank    bool               // the elements were not read, because no packet can get here
}

// changing reports whether packets change the elements.
func (n *nset) changing() bool { return n.flags&(setTimeout|setEval) != 0 }

// concat reports whether the key is a concatenation.
func (n *nset) concat() bool {
	if n.flags&setConcat != 0 {
		return true
	}
	for _, e := range n.elems {
		return e.end != nil // concatenated ranges carry NFTA_SET_ELEM_KEY_END
	}
	return false
}

// hasCatchall reports whether an element stands for all keys without another.
func (n *nset) hasCatchall() bool {
	_, ok := n.elems[element{flags: elemCatchall}.id()]
	return ok
}

// element is one element as the kernel gave it; key is nil for the catch-all.
type element struct {
	key, end []byte
	data     []byte // value of a map
	verdict  *verdict
	flags    uint32
	expires  bool
}

func (e element) id() string {
	return fmt.Sprintf("%x/%x/%d", e.key, e.end, e.flags&elemIntervalEnd)
}

func (e element) equal(f element) bool {
	if (e.verdict == nil) != (f.verdict == nil) || e.verdict != nil && *e.verdict != *f.verdict {
		return false
	}
	return bytes.Equal(e.key, f.key) && bytes.Equal(e.end, f.end) && bytes.Equal(e.data, f.data) &&
		e.flags == f.flags && e.expires == f.expires
}

// Set and element flags (linux/netfilter/nf_tables.h).
const (
	setInterval = 0x4
	setMap      = 0x8
	setTimeout  = 0x10
	setEval     = 0x20
	setConcat   = 0x80

	elemIntervalEnd = 1
	elemCatchall    = 2
)

// verdictData is the data type of a verdict map (NFT_DATA_VERDICT).
const verdictData = 0xffffff00

// verdict is where a packet goes next.
type verdict struct {
	code  int32
	chain string
}

// Verdict codes (linux/netfilter.h, linux/netfilter/nf_tables.h).
const (
	vDrop     = 0
	vAccept   = 1
	vContinue = -1
	vBreak    = -2
	vJump     = -3
	vGoto     = -4
	vReturn   = -5
)

// snapshot is a consistent ruleset as a dump gives it. Only tables with a nat
// base chain on PREROUTING or OUTPUT are in it.
type snapshot struct {
	gen    uint32 // nftables generation; 0 in a legacy snapshot
	tables []*tableSnap
	others []tableID // tables without a nat base chain
}

type tableSnap struct {
	id      tableID
	handle  uint64
	dormant bool
	owned   bool
	chains  []*chainSnap
	sets    []*nset
}

type chainSnap struct {
	name  string
	hook  *hookPoint
	rules []ruleSnap
}

type ruleSnap struct {
	handle uint64
	raw    []byte
}

func (s *tableSnap) nat() bool {
	return slices.ContainsFunc(s.chains, func(c *chainSnap) bool { return c.hook.nat() })
}
