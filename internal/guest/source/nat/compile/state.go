// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"math"
	"strings"

	"github.com/fairlead/fairlead/internal/guest/source/nat/ruleset"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/compact"
)

// table, chain and rule are the compiler's ruleset. They are owned by one
// goroutine.
type table struct {
	id       ruleset.TableID
	handle   uint64 // 0: not known
	dormant  bool
	owned    bool // it goes with the socket of the program that made it
	chains   map[string]*chain
	byHandle map[uint64]*chain
	sets     map[string]*namedSet
	most     compact.Peak
}

// families returns for which of IPv4 (false) and IPv6 (true) the table has rules.
func (t *table) families() []bool {
	switch t.id.Family {
	case ruleset.FamilyIP:
		return []bool{false}
	case ruleset.FamilyIP6:
		return []bool{true}
	}
	return []bool{false, true}
}

// inertness is whether nothing in a chain jumps or decides.
type inertness uint8

const (
	notKnown inertness = iota
	isInert
	notInert
)

type chain struct {
	table  *table
	name   string
	handle uint64        // 0 in legacy tables
	hook   *ruleset.Hook // nil: not a base chain
	// registered rises with each base chain that is seen to be made or woken up.
	// Those of one dump have the same.
	registered uint64
	rules      []*rule
	acts       []*activation    // every way in which packets come here
	index      map[uint64]*rule // by handle, in nftables
	gone       int              // how many of rules are gone, see removeRule
	inert      inertness
	most       compact.Peak // of rules
}

type rule struct {
	chain  *chain
	handle uint64 // 0 in legacy tables
	raw    []byte // as the kernel gave it; decides whether a rule changed
	pos    int    // index in chain.rules
	gone   bool   // deleted by the commit that is being read
	guess  bool   // its place is one, see Mirror.Order

	eval [2]*evaluation // for IPv4 and IPv6, nil until needed
}

// policy returns what stands for the chain's policy, after all its rules.
func (ch *chain) policy() *rule { return &rule{chain: ch, pos: policyPosition} }

const policyPosition = math.MaxInt

// namedSet is a set with the rules that read it.
type namedSet struct {
	ruleset.Set
	users map[*rule]struct{} // rules whose evaluation read it
	most  compact.Peak       // of elements
}

// text returns the rule's human-readable text.
func (r *rule) text() string { return ruleset.Text(r.chain.table.id, r.raw) }

// maker returns the program that wrote a rule, by the names of the tables and
// chains in which such programs keep the rules that redirect.
func (r *rule) maker() port.Maker {
	table, chain := r.chain.table.id.Name, r.chain.name
	switch {
	case chain == "DOCKER", table == "docker-bridges":
		return port.MakerDocker
	case chain == "DOCKER-INGRESS":
		return port.MakerSwarm
	case strings.HasPrefix(chain, "CNI-DN-"), table == "cni_hostport":
		return port.MakerCNI
	case strings.HasPrefix(chain, "KUBE-SEP-"), table == "kube-proxy":
		return port.MakerKubeProxy
	case strings.HasPrefix(chain, "NETAVARK-DN-"), table == "netavark":
		return port.MakerNetavark
	}
	return port.MakerUnknown
}

func sameHook(a, b *ruleset.Hook) bool {
	return a == nil && b == nil || a != nil && b != nil && *a == *b
}
