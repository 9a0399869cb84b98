// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"net/netip"
	"slices"

	"github.com/fairlead/fairlead/internal/guest/source/nat/region"
	"github.com/fairlead/fairlead/internal/guest/source/nat/ruleset"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/compact"
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
	host     machine
	env      env

	tables  map[ruleset.TableID]*table
	seen    uint64                            // numbers what registers base chains
	callers map[ruleset.ChainID]map[*rule]int // rules that jump to a chain, and by how many branches
	holes   []*chain                          // chains with rules that are gone
	markers map[*rule]struct{}                // rules that set the packet mark
	testers map[*rule]struct{}                // rules that test it
	dirty   dirty
	index   index

	published map[slotID][]published
	most      compact.Peak
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
		host:     newMachine(Host{}),
		tables:   make(map[ruleset.TableID]*table),
		callers:  make(map[ruleset.ChainID]map[*rule]int),
		dirty: dirty{
			rules:  make(map[*rule]struct{}),
			elems:  make(map[*namedSet]map[string]struct{}),
			chains: make(map[*chain]struct{}),
		},
		markers:   make(map[*rule]struct{}),
		testers:   make(map[*rule]struct{}),
		index:     newIndex(),
		published: make(map[slotID][]published),
	}
}

// SetHost states what the machine is like. If that changed, every rule is evaluated
// again.
func (c *Compiler) SetHost(h Host) {
	if c.host.equal(&h) {
		return
	}
	c.host = newMachine(h)
	c.env.links = h.Links
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
		t = &table{id: id, chains: make(map[string]*chain), byHandle: make(map[uint64]*chain), sets: make(map[string]*namedSet)}
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
			ch.registered = c.seen
			c.dirty.chains[ch] = struct{}{}
		}
	}
}

// putChain states a chain.
func (c *Compiler) putChain(t *table, name string, handle uint64, hook *ruleset.Hook) *chain {
	ch := t.chains[name]
	if ch == nil {
		ch = &chain{table: t, name: name, handle: handle, hook: hook, registered: c.seen}
		t.chains[name] = ch
		if handle != 0 {
			t.byHandle[handle] = ch
		}
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
	delete(ch.table.byHandle, ch.handle)
	ch.table.shrink()
	for r := range c.callers[ruleset.ChainID{Table: ch.table.id, Name: ch.name}] {
		c.touch(r)
	}
}

// newRule makes a rule that is in no chain yet. Whether it sets the packet mark
// matters even where no nat hook leads: a mark can be set in any chain before.
func (c *Compiler) newRule(ch *chain, handle uint64, raw []byte) *rule {
	r := &rule{chain: ch, handle: handle, raw: raw}
	if ruleset.SetsMark(ch.table.id, raw) {
		c.markers[r] = struct{}{}
	}
	return r
}

// insertRule puts a rule at index at.
func (c *Compiler) insertRule(ch *chain, at int, handle uint64, raw []byte) {
	r := c.newRule(ch, handle, raw)
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
	if r.chain.gone++; r.chain.gone == 1 {
		c.holes = append(c.holes, r.chain)
	}
}

// tidy closes the places of rules that are gone.
func (c *Compiler) tidy() {
	for _, ch := range c.holes {
		ch.gone = 0
		ch.rules = slices.DeleteFunc(ch.rules, func(r *rule) bool {
			if r.gone && ch.index[r.handle] == r {
				delete(ch.index, r.handle)
			}
			return r.gone
		})
		ch.renumber(0)
		ch.shrink()
	}
	c.holes = nil
}

func (ch *chain) renumber(from int) {
	ch.most.Reached(len(ch.rules))
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
	delete(c.markers, r)
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
		for _, b := range e.branches.all() {
			c.calls(r, b, -1)
		}
		r.eval[i] = nil
	}
	delete(c.testers, r)
}

// putSet states a set; one of another make replaces the old one. If it is not new, its
// elements are as they were.
func (c *Compiler) putSet(t *table, n *ruleset.Set) *namedSet {
	old := t.sets[n.Name]
	if old != nil && old.Handle == n.Handle && old.Flags == n.Flags && old.KeyLen == n.KeyLen && old.DataLen == n.DataLen && old.DataType == n.DataType {
		return old
	}
	if old != nil {
		c.dropSet(t, n.Name)
	}
	set := &namedSet{Set: *n, users: make(map[*rule]struct{})}
	if set.Elements == nil {
		set.Elements = make(map[string]ruleset.Element)
	}
	t.sets[n.Name] = set
	return set
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
	t.shrink()
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
	if n.most.Passed(len(n.Elements)) {
		n.Elements = compact.Map(n.Elements)
	}
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
	if e.testsMark {
		c.testers[r] = struct{}{}
	}
	for _, n := range e.sets {
		n.users[r] = struct{}{}
		c.missing = c.missing || n.Blank
	}
	for _, b := range e.branches.all() {
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
	c.testMarks()
	for round := 0; c.dirty.any() && round < 4*maxDepth; round++ {
		c.commitRound()
	}
	return c.publish()
}

// commitRound works out what is dirty, which may make more dirty.
func (c *Compiler) commitRound() {
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

// testMarks has tests of the packet mark evaluated again where the first rule that
// sets it has come, or the last has gone.
func (c *Compiler) testMarks() {
	if marked := len(c.markers) > 0; marked != c.env.marked {
		c.env.marked = marked
		for r := range c.testers {
			c.touch(r)
		}
	}
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
		if part.tooMany || part.testsMark || e.testsMark {
			return false
		}
		for k := range keys {
			if b := e.branches.get(k); b != nil {
				c.calls(r, b, -1)
				e.branches.drop(k)
			}
		}
		for k, b := range part.branches.all() {
			e.branches.put(k, b)
			c.calls(r, b, 1)
		}
		e.shrink(r)
		if e.inert && part.branches.len() > 0 {
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
		a := &activation{chain: ch, way: &way{chain: ch.name}, m: c.arriving(uint8(ch.hook.Num), v6), v6: v6, hook: uint8(ch.hook.Num)}
		a.root = a
		c.enter(a)
		if ch.hook.Drop {
			c.addEntry(&entry{act: a, rule: ch.policy(), m: a.m, end: branchEnd{kind: endDrop}})
		}
	}
}

// arriving returns the packets that come to a hook.
func (c *Compiler) arriving(hook uint8, v6 bool) match {
	m := everything()
	if hook == ruleset.HookOutput {
		m.In, m.From = region.Named(""), region.Local
		return m
	}
	// What begins here comes in over the loopback with its destination decided in
	// the output hook, where the kernel has its own if no rule does. So neither the
	// loopback interface nor a loopback address is met here.
	m.In, m.Out, m.To = c.host.loopbacks.Complement(), region.Named(""), region.Local
	m.Daddr = loopbackAddrs(v6).Complement()
	return m
}

func loopbackAddrs(v6 bool) region.Set[netip.Addr] {
	if v6 {
		return region.Addrs(true).One(netip.IPv6Loopback())
	}
	return region.Prefix(netip.PrefixFrom(netip.AddrFrom4([4]byte{127}), 8))
}

// matters reports whether packets that m matches bear on a publication: those to
// an address of this machine, and those that a dial of a DNAT target is among.
// Output rules for a single address elsewhere are kept apart, see index.remote.
func (c *Compiler) matters(m *match, hook uint8, v6 bool) bool {
	if m.To&region.Local != 0 && (region.Most(m.Daddr, v6) || region.Addrs(v6).Meets(c.host.local[familyIndex(v6)], m.Daddr)) {
		return true
	}
	if hook != ruleset.HookOutput || m.To&region.Remote == 0 {
		return false
	}
	_, single := singleAddr(m.Daddr, v6)
	return !single
}

// singleAddr returns the only address of s; ok is false if it has more.
func singleAddr(s region.Set[netip.Addr], v6 bool) (a netip.Addr, ok bool) {
	if s.All() {
		return a, false
	}
	spans := region.Addrs(v6).Spans(s)
	if len(spans) != 1 || spans[0].Lo != spans[0].Hi {
		return a, false
	}
	return spans[0].Lo, true
}

// localKeys returns own addresses in s, at most maxKeys: of a local network one
// address, which for that of the loopback is 127.0.0.1.
func (c *Compiler) localKeys(s region.Set[netip.Addr], v6 bool) []netip.Addr {
	addrs := region.Addrs(v6)
	if s = addrs.Intersect(s, c.host.local[familyIndex(v6)]); s.Empty() {
		return nil
	}
	var out []netip.Addr
	seen := make(map[netip.Addr]struct{})
	for _, p := range c.host.Local {
		if p.Addr().Is4() == v6 {
			continue
		}
		span := region.PrefixSpan(p)
		a, ok := addrs.First(s, span)
		if lo := port.Loopback(p.Addr()); p.Contains(lo) && addrs.Contains(s, lo) {
			a = lo
		}
		if _, twice := seen[a]; !ok || twice || a.IsLinkLocalUnicast() {
			continue
		}
		seen[a] = struct{}{}
		if out = append(out, a); len(out) == maxKeys {
			return out
		}
	}
	return out
}
