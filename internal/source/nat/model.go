// SPDX-License-Identifier: Apache-2.0

package nat

import (
	"bytes"
	"fmt"
	"slices"
	"strings"

	"github.com/fairlead/fairlead/internal/port"
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

// table, chain and rule are the compiler's ruleset. They are owned by one
// goroutine.
type table struct {
	id      tableID
	handle  uint64 // 0: not known
	dormant bool
	owned   bool // it goes with the socket of the program that made it
	chains  map[string]*chain
	sets    map[string]*nset
}

type chain struct {
	table *table
	name  string
	hook  *hookPoint // nil: not a base chain
	rules []*rule
	acts  []*activation    // every way in which packets come here
	index map[uint64]*rule // by handle, in nftables
	holes bool             // some rules are gone
}

type rule struct {
	chain  *chain
	handle uint64 // 0 in legacy tables
	raw    []byte // as the kernel gave it; decides whether a rule changed
	pos    int    // index in chain.rules
	gone   bool   // deleted by the commit that is being read

	eval [2]*evaluation // for IPv4 and IPv6, nil until needed
}

// maker returns the program that wrote a rule, by the names of the tables and
// chains in which such programs keep the rules that redirect.
func (r *rule) maker() port.Maker {
	table, chain := r.chain.table.id.name, r.chain.name
	switch {
	case chain == "DOCKER", table == "docker-bridges":
		return port.MakerDocker
	case strings.HasPrefix(chain, "CNI-DN-"), table == "cni_hostport":
		return port.MakerCNI
	case strings.HasPrefix(chain, "KUBE-SEP-"), table == "kube-proxy":
		return port.MakerKubeProxy
	}
	return ""
}

// nset is an nftables set or map.
type nset struct {
	name     string
	handle   uint64 // another for each set of one name, 0 if unknown
	flags    uint32
	keyLen   int
	dataLen  int
	dataType uint32
	elems    map[string]element // by key, flags and key end
	users    map[*rule]struct{} // rules whose evaluation read it
	blank    bool               // its elements were not dumped, because no packet could come here
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

func sameHook(a, b *hookPoint) bool {
	return a == nil && b == nil || a != nil && b != nil && *a == *b
}
