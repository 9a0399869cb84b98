// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/fairlead/fairlead/internal/guest/source/nat/region"
	"github.com/fairlead/fairlead/internal/guest/source/nat/ruleset"
)

// activation is one way in which packets enter a chain.
type activation struct {
	chain  *chain
	way    *way
	parent *activation
	via    *rule  // that jumps here; nil for a base chain
	key    string // branch of via
	m      match
	v6     bool
	hook   uint8
	depth  int
	root   *activation
	kids   map[*rule]map[string]*activation // entered from here, by rule and branch
	outs   map[*rule][]*entry               // what rules decide here
}

// entry is a rule that decides about packets, reached in one way.
type entry struct {
	act     *activation
	rule    *rule
	key     string
	m       match
	end     branchEnd
	problem string // why it cannot be published
	wide    bool
	remote  netip.Addr // the single address elsewhere that it is for, if so
}

// enter walks packets through a chain.
func (c *Compiler) enter(a *activation) {
	a.kids = make(map[*rule]map[string]*activation)
	a.outs = make(map[*rule][]*entry)
	a.chain.acts = append(a.chain.acts, a)
	for _, r := range a.chain.rules {
		c.addRule(a, r, nil)
	}
}

// leave removes an activation and all below it.
func (c *Compiler) leave(a *activation) {
	for r := range a.outs {
		c.dropEntries(a, r, nil)
	}
	for r, kids := range a.kids {
		for k, kid := range kids {
			delete(kids, k)
			c.leave(kid)
		}
		delete(a.kids, r)
	}
	if i := slices.Index(a.chain.acts, a); i >= 0 {
		a.chain.acts = slices.Delete(a.chain.acts, i, i+1)
	}
	if a.parent != nil && a.parent.kids[a.via][a.key] == a {
		delete(a.parent.kids[a.via], a.key)
	}
}

// clearRule removes what came from r.
func (c *Compiler) clearRule(a *activation, r *rule) {
	c.dropEntries(a, r, nil)
	for k, kid := range a.kids[r] {
		delete(a.kids[r], k)
		c.leave(kid)
	}
	delete(a.kids, r)
}

// clearBranches removes what came from some branches of r.
func (c *Compiler) clearBranches(a *activation, r *rule, keys map[string]struct{}) {
	c.dropEntries(a, r, keys)
	for k := range keys {
		if kid := a.kids[r][k]; kid != nil {
			delete(a.kids[r], k)
			c.leave(kid)
		}
	}
}

// addRule adds what r, or only some branches of it, does to packets of a.
func (c *Compiler) addRule(a *activation, r *rule, only map[string]struct{}) {
	ev := c.evaluation(r, a.v6)
	add := func(key string, b *branch) {
		m := a.m.and(b.m, a.v6)
		switch {
		case m.Empty():
		case c.matters(&m, a.hook, a.v6):
			c.addBranch(a, r, key, m, b.end)
		case a.hook == ruleset.HookOutput && m.To&region.Remote != 0:
			c.addRemote(&entry{act: a, rule: r, key: key, m: m, end: b.end})
		}
	}
	if only != nil {
		for k := range only {
			if b := ev.branches.get(k); b != nil {
				add(k, b)
			}
		}
	} else {
		for k, b := range ev.branches.all() {
			add(k, b)
		}
	}
	if ev.tooMany {
		m := a.m
		m.opaque = append(slices.Clip(m.opaque), "too many combinations")
		c.addEntry(&entry{act: a, rule: r, m: m, end: branchEnd{kind: endUnknown}, problem: "too many combinations"})
	}
}

func (c *Compiler) addBranch(a *activation, r *rule, key string, m match, end branchEnd) {
	e := &entry{act: a, rule: r, key: key, m: m, end: end}
	switch end.kind {
	case endJump, endGoto:
		to := r.chain.table.chains[end.chain]
		// The chain does not exist yet; putChain evaluates the rule again.
		if to == nil {
			return
		}
		if !c.isInert(to) {
			if a.depth >= maxDepth || len(to.acts) >= maxActivations {
				e.end = branchEnd{kind: endUnknown}
				e.problem = fmt.Sprintf("chain %s is reached too deep or in too many ways", to.name)
				e.m.opaque = append(slices.Clip(m.opaque), e.problem)
				c.addEntry(e)
				return
			}
			kid := &activation{chain: to, way: &way{to.name, a.way}, parent: a, via: r, key: key, m: m, v6: a.v6, hook: a.hook, depth: a.depth + 1, root: a.root}
			if a.kids[r] == nil {
				a.kids[r] = make(map[string]*activation)
			}
			a.kids[r][key] = kid
			c.enter(kid)
		}
		if end.kind == endJump {
			return
		}
		e.end.kind = endReturn // nothing comes back from a goto
	case endNat, endUnknown:
		ports := region.CountPorts(m.Dport)
		switch {
		case len(m.opaque) > 0:
			e.problem = "condition not understood: " + strings.Join(m.opaque, ", ")
		case m.marked:
			e.problem = "condition not understood: a packet mark or a related connection"
		case end.why != "":
			e.problem = "target not understood: " + end.why
		case ports > c.maxPorts:
			e.problem = fmt.Sprintf("matches %d ports, more than %d (--nat-max-ports)", ports, c.maxPorts)
		}
	}
	if end.kind == endUnknown {
		e.m.opaque = append(slices.Clip(m.opaque), end.why)
	}
	c.addEntry(e)
}

// addRemote adds what a rule of the output hook does to connections to a single
// address elsewhere. A jump is not followed.
func (c *Compiler) addRemote(e *entry) {
	switch e.end.kind {
	case endJump, endGoto:
		to := e.rule.chain.table.chains[e.end.chain]
		if to == nil || e.end.kind == endJump && c.isInert(to) {
			return
		}
		e.m.opaque = append(slices.Clip(e.m.opaque), "chain "+to.name)
		e.end.kind = endUnknown
	case endNat:
		if e.end.nat == nil {
			e.m.opaque = append(slices.Clip(e.m.opaque), e.end.why)
		}
	case endUnknown:
		e.m.opaque = append(slices.Clip(e.m.opaque), e.end.why)
	}
	addr, _ := singleAddr(e.m.Daddr, e.act.v6)
	c.index.addRemote(e, addr)
	e.act.outs[e.rule] = append(e.act.outs[e.rule], e)
}

// addEntry adds what a rule decides.
func (c *Compiler) addEntry(e *entry) {
	limit := narrowPorts
	if e.end.kind == endNat && e.problem == "" {
		limit = c.maxPorts
	}
	c.index.add(e, limit)
	e.act.outs[e.rule] = append(e.act.outs[e.rule], e)
}

// dropEntries removes what r decides, or only what some of its branches do.
func (c *Compiler) dropEntries(a *activation, r *rule, keys map[string]struct{}) {
	keep := a.outs[r][:0:0]
	for _, e := range a.outs[r] {
		if keys != nil {
			if _, ok := keys[e.key]; !ok {
				keep = append(keep, e)
				continue
			}
		}
		c.index.drop(e)
	}
	if len(keep) > 0 {
		a.outs[r] = keep
	} else {
		delete(a.outs, r)
	}
}
