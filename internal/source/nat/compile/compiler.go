// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"net/netip"
	"slices"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/source/nat/ruleset"
)

// Bounds on what a ruleset can make the compiler do.
const (
	maxDepth       = 32   // jumps; the kernel's stack has 16 (NFT_JUMP_STACK_SIZE)
	maxActivations = 1024 // ways into one chain
	maxWide        = 256  // rules without a port that come before others
	maxSlotEntries = 2048 // rules for one port
	narrowPorts    = 64   // a rule that only decides is kept by port up to here
	maxDial        = 16
	maxKeys        = 256 // addresses that one rule is published for
)

// Compiler keeps a ruleset and what follows from it. It is not safe for concurrent
// use.
type Compiler struct {
	maxPorts int
	host     Host
	env      env

	tables  map[ruleset.TableID]*table
	callers map[ruleset.ChainID]map[*rule]int // rules that jump to a chain, and by how many branches
	holes   []*chain                          // chains with rules that are gone
	dirty   dirty
	index   index

	published map[slotID][]port.Binding
	count     int  // of bindings in published
	evals     int  // rules evaluated since the start
	missing   bool // the last commit read a set whose elements are not known
}

// dirty is what changed since the last commit.
type dirty struct {
	rules  map[*rule]struct{}
	elems  map[*namedSet]map[string]struct{}
	chains map[*chain]struct{} // base chains that are new or changed
}

func (d *dirty) any() bool { return len(d.rules)+len(d.elems)+len(d.chains) > 0 }

// New returns a compiler of an empty ruleset. A rule for more than maxPorts ports
// is not published.
func New(maxPorts int) *Compiler {
	return &Compiler{
		maxPorts: maxPorts,
		tables:   make(map[ruleset.TableID]*table),
		callers:  make(map[ruleset.ChainID]map[*rule]int),
		dirty: dirty{
			rules:  make(map[*rule]struct{}),
			elems:  make(map[*namedSet]map[string]struct{}),
			chains: make(map[*chain]struct{}),
		},
		index:     newIndex(),
		published: make(map[slotID][]port.Binding),
	}
}

// SetHost states what the machine is like. If that changed, every rule is evaluated
// again.
func (c *Compiler) SetHost(h Host) {
	if c.host.equal(&h) {
		return
	}
	c.host = h
	c.env = env{links: h.Links}
	for _, t := range c.tables {
		for _, ch := range t.chains {
			for _, r := range ch.rules {
				c.touch(r)
			}
			if ch.hook.IsNAT() {
				c.dirty.chains[ch] = struct{}{}
			}
		}
	}
	for id := range c.index.slots {
		c.index.dirtySlots[id] = struct{}{}
	}
}

func (c *Compiler) table(id ruleset.TableID) *table {
	t := c.tables[id]
	if t == nil {
		t = &table{id: id, chains: make(map[string]*chain), sets: make(map[string]*namedSet)}
		c.tables[id] = t
	}
	return t
}

func (c *Compiler) dropTable(id ruleset.TableID) {
	t := c.tables[id]
	if t == nil {
		return
	}
	for _, ch := range t.chains {
		c.dropChain(ch)
	}
	delete(c.tables, id)
}

// OwnedTables returns the tables that go with a program's socket.
func (c *Compiler) OwnedTables() (out []ruleset.TableID) {
	for id, t := range c.tables {
		if t.owned {
			out = append(out, id)
		}
	}
	return out
}

func (c *Compiler) setDormant(t *table, dormant bool) {
	if t.dormant == dormant {
		return
	}
	t.dormant = dormant
	for _, ch := range t.chains {
		if ch.hook.IsNAT() {
			c.dirty.chains[ch] = struct{}{}
		}
	}
}

func (c *Compiler) putChain(t *table, name string, hook *ruleset.Hook) *chain {
	ch := t.chains[name]
	if ch == nil {
		ch = &chain{table: t, name: name, hook: hook}
		t.chains[name] = ch
		c.dirty.chains[ch] = struct{}{}
		for r := range c.callers[ruleset.ChainID{Table: t.id, Name: name}] {
			c.touch(r)
		}
	} else if !sameHook(ch.hook, hook) {
		ch.hook = hook
		c.dirty.chains[ch] = struct{}{}
	}
	return ch
}

func (c *Compiler) dropChain(ch *chain) {
	for len(ch.acts) > 0 {
		c.leave(ch.acts[len(ch.acts)-1])
	}
	for _, r := range ch.rules {
		c.forget(r)
	}
	ch.rules = nil
	delete(c.dirty.chains, ch)
	delete(ch.table.chains, ch.name)
	for r := range c.callers[ruleset.ChainID{Table: ch.table.id, Name: ch.name}] {
		c.touch(r)
	}
}

// insertRule puts a rule at index at.
func (c *Compiler) insertRule(ch *chain, at int, handle uint64, raw []byte) {
	r := &rule{chain: ch, handle: handle, raw: raw}
	ch.rules = slices.Insert(ch.rules, at, r)
	ch.renumber(at)
	ch.learn(r)
	c.touch(r)
}

// removeRule removes a rule. Its place is closed by tidy, so that deleting many is
// cheap and a position that names it can still be found.
func (c *Compiler) removeRule(r *rule) {
	c.forget(r)
	r.gone = true
	if !r.chain.holes {
		r.chain.holes = true
		c.holes = append(c.holes, r.chain)
	}
}

// tidy closes the places of rules that are gone.
func (c *Compiler) tidy() {
	for _, ch := range c.holes {
		ch.holes = false
		ch.rules = slices.DeleteFunc(ch.rules, func(r *rule) bool {
			if r.gone && ch.index[r.handle] == r {
				delete(ch.index, r.handle)
			}
			return r.gone
		})
		ch.renumber(0)
	}
	c.holes = c.holes[:0]
}

func (ch *chain) renumber(from int) {
	for i := from; i < len(ch.rules); i++ {
		ch.rules[i].pos = i
	}
}

func (ch *chain) learn(r *rule) {
	if r.handle != 0 {
		if ch.index == nil {
			ch.index = make(map[uint64]*rule)
		}
		ch.index[r.handle] = r
	}
}

// touch marks a rule to be evaluated again.
func (c *Compiler) touch(r *rule) { c.dirty.rules[r] = struct{}{} }

// forget removes all that came from a rule.
func (c *Compiler) forget(r *rule) {
	for _, a := range r.chain.acts {
		c.clearRule(a, r)
	}
	c.unread(r)
	delete(c.dirty.rules, r)
	c.inertChanged(r.chain)
}

// unread drops a rule's evaluations.
func (c *Compiler) unread(r *rule) {
	for i, e := range r.eval {
		if e == nil {
			continue
		}
		for _, n := range e.sets {
			delete(n.users, r)
		}
		for _, b := range e.branches {
			c.calls(r, b, -1)
		}
		r.eval[i] = nil
	}
}

// putSet states a set; one of another make replaces the old one. It reports
// whether the set is new. If it is not, its elements are as they were.
func (c *Compiler) putSet(t *table, n *ruleset.Set) (set *namedSet, fresh bool) {
	old := t.sets[n.Name]
	if old != nil && old.Handle == n.Handle && old.Flags == n.Flags && old.KeyLen == n.KeyLen && old.DataLen == n.DataLen && old.DataType == n.DataType {
		return old, false
	}
	if old != nil {
		c.dropSet(t, n.Name)
	}
	set = &namedSet{Set: *n, users: make(map[*rule]struct{})}
	if set.Elements == nil {
		set.Elements = make(map[string]ruleset.Element)
	}
	t.sets[n.Name] = set
	return set, true
}

func (c *Compiler) dropSet(t *table, name string) {
	n := t.sets[name]
	if n == nil {
		return
	}
	for r := range n.users {
		c.touch(r)
	}
	delete(c.dirty.elems, n)
	delete(t.sets, name)
}

func (c *Compiler) putElem(n *namedSet, e ruleset.Element) {
	id := e.ID()
	if old, ok := n.Elements[id]; ok && old.Equal(e) {
		return
	}
	n.Elements[id] = e
	c.touchElem(n, id)
}

func (c *Compiler) dropElem(n *namedSet, id string) {
	if _, ok := n.Elements[id]; !ok {
		return
	}
	delete(n.Elements, id)
	c.touchElem(n, id)
}

func (c *Compiler) touchElem(n *namedSet, id string) {
	m := c.dirty.elems[n]
	if m == nil {
		m = make(map[string]struct{})
		c.dirty.elems[n] = m
	}
	m[id] = struct{}{}
}

func (c *Compiler) evaluation(r *rule, v6 bool) *evaluation {
	i := 0
	if v6 {
		i = 1
	}
	if e := r.eval[i]; e != nil {
		return e
	}
	e := evaluate(r, v6, &c.env, nil)
	c.evals++
	r.eval[i] = e
	for _, n := range e.sets {
		n.users[r] = struct{}{}
		c.missing = c.missing || n.Blank
	}
	for _, b := range e.branches {
		c.calls(r, b, 1)
	}
	return e
}

// calls adds n to the count of branches of r that jump to b's chain.
func (c *Compiler) calls(r *rule, b *branch, n int) {
	if b.end.chain == "" {
		return
	}
	id := ruleset.ChainID{Table: r.chain.table.id, Name: b.end.chain}
	m := c.callers[id]
	if m == nil {
		m = make(map[*rule]int)
		c.callers[id] = m
	}
	if m[r] += n; m[r] <= 0 {
		delete(m, r)
	}
	if len(m) == 0 {
		delete(c.callers, id)
	}
}

// isInert reports whether nothing in ch jumps or decides, as in chains that only
// mark packets.
func (c *Compiler) isInert(ch *chain) bool {
	if ch.inert == notKnown {
		ch.inert = isInert
		if slices.ContainsFunc(ch.rules, func(r *rule) bool { return !c.ruleInert(r) }) {
			ch.inert = notInert
		}
	}
	return ch.inert == isInert
}

// ruleInert answers for both families that the rule's table serves.
func (c *Compiler) ruleInert(r *rule) bool {
	for _, v6 := range r.chain.table.families() {
		if !c.evaluation(r, v6).inert {
			return false
		}
	}
	return true
}

// inertChanged forgets whether ch is inert. If it was, those who jump to it are
// evaluated again.
func (c *Compiler) inertChanged(ch *chain) {
	if ch.inert == isInert {
		for r := range c.callers[ruleset.ChainID{Table: ch.table.id, Name: ch.name}] {
			c.touch(r)
		}
	}
	ch.inert = notKnown
}

// Commit evaluates what is dirty and returns what that changed, as one step.
func (c *Compiler) Commit() port.Change {
	c.missing = false
	c.tidy()
	for round := 0; c.dirty.any() && round < 4*maxDepth; round++ {
		c.commitElems()
		rules := c.dirty.rules
		c.dirty.rules = make(map[*rule]struct{})
		for r := range rules {
			for _, a := range r.chain.acts {
				c.clearRule(a, r)
			}
			c.unread(r)
			c.inertChanged(r.chain)
		}
		chains := c.dirty.chains
		c.dirty.chains = make(map[*chain]struct{})
		for ch := range chains {
			c.root(ch)
		}
		for r := range rules {
			for _, a := range slices.Clone(r.chain.acts) {
				// A way that opened just now has the rule already.
				if _, done := a.outs[r]; !done && a.kids[r] == nil {
					c.addRule(a, r, nil)
				}
			}
		}
	}
	return c.publish()
}

// commitElems evaluates elements that were added or removed, alone where that is enough.
func (c *Compiler) commitElems() {
	sets := c.dirty.elems
	c.dirty.elems = make(map[*namedSet]map[string]struct{})
	for n, ids := range sets {
		for r := range n.users {
			if _, ok := c.dirty.rules[r]; ok {
				continue
			}
			if !c.patchRule(r, n, ids) {
				c.touch(r)
			}
		}
	}
}

// patchRule evaluates only the branches of some elements of n. It reports whether
// that is enough.
func (c *Compiler) patchRule(r *rule, n *namedSet, ids map[string]struct{}) bool {
	keys := make(map[string]struct{}, len(ids))
	for id := range ids {
		keys[id+";"] = struct{}{}
	}
	for _, e := range r.eval {
		if e != nil && (e.split != n || e.tooMany || n.HasCatchall()) {
			return false
		}
	}
	for _, a := range r.chain.acts {
		c.clearBranches(a, r, keys)
	}
	for i, e := range r.eval {
		if e == nil {
			continue
		}
		part := evaluate(r, i == 1, &c.env, ids)
		c.evals++
		if part.tooMany {
			return false
		}
		for k := range keys {
			if b := e.branches[k]; b != nil {
				c.calls(r, b, -1)
				delete(e.branches, k)
			}
		}
		for k, b := range part.branches {
			e.branches[k] = b
			c.calls(r, b, 1)
		}
		if e.inert && len(part.branches) > 0 {
			return false // the chain may begin to matter
		}
	}
	for _, a := range r.chain.acts {
		c.addRule(a, r, keys)
	}
	return true
}

// root walks a base chain again, for each family that its table serves.
func (c *Compiler) root(ch *chain) {
	for _, a := range slices.Clone(ch.acts) {
		if a.parent == nil {
			c.leave(a)
		}
	}
	if ch.table.chains[ch.name] != ch || !ch.hook.IsNAT() || ch.table.dormant {
		return
	}
	for _, v6 := range ch.table.families() {
		m := everything()
		if ch.hook.Num == ruleset.HookOutput {
			m.iif, m.oif, m.src = ifaceIn(false, ""), ifaceIn(false, c.loopbacks()...), srcLocal
		} else {
			// What begins here comes in over the loopback with its destination decided
			// in the output hook, where the kernel has its own if no rule does.
			m.iif, m.oif = ifaceIn(true, c.loopbacks()...), ifaceIn(false, "")
		}
		a := &activation{chain: ch, way: &way{chain: ch.name}, m: m, v6: v6, hook: uint8(ch.hook.Num)}
		a.root = a
		c.enter(a)
	}
}

func (c *Compiler) loopbacks() []string {
	if len(c.host.Loopback) == 0 {
		return []string{"lo"}
	}
	return slices.Clone(c.host.Loopback)
}

// reachesHost reports whether m matches some address of this machine.
func (c *Compiler) reachesHost(m *match, v6 bool) bool {
	return mostAddrs(m.daddr) || len(c.localKeys(m.daddr, v6, 1)) > 0
}

// localKeys returns own addresses in s, at most limit.
func (c *Compiler) localKeys(s set[netip.Addr], v6 bool, limit int) []netip.Addr {
	o := addrOrderOf(v6)
	var out []netip.Addr
	lo := port.Loopback(o.min)
	for _, p := range c.host.Local {
		if p.Addr().Is4() == v6 {
			continue
		}
		for _, r := range o.intersect(s, o.normal([]span[netip.Addr]{prefixSpan(p)})) {
			a := r.lo
			if lo.Compare(r.lo) >= 0 && lo.Compare(r.hi) <= 0 {
				a = lo
			}
			if a.IsLinkLocalUnicast() || slices.Contains(out, a) {
				continue
			}
			if out = append(out, a); len(out) == limit {
				return out
			}
		}
	}
	return out
}
