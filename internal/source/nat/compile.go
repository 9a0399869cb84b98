// SPDX-License-Identifier: Apache-2.0

package nat

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/fairlead/fairlead/internal/port"
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

// host is what the compiler needs to know of the machine.
type host struct {
	links    map[uint32]string // interface names by index
	local    []netip.Prefix    // routes of type local
	nodes    []netip.Addr      // own addresses that others can reach, the default route's first
	uplinks  []string          // interfaces that carry a default route
	loopback []string
}

func (h *host) equal(o *host) bool {
	return maps.Equal(h.links, o.links) && slices.Equal(h.local, o.local) && slices.Equal(h.nodes, o.nodes) &&
		slices.Equal(h.uplinks, o.uplinks) && slices.Equal(h.loopback, o.loopback)
}

// Problem is a rule that leads to a DNAT or REDIRECT but is not published,
// because it is not understood.
type Problem struct {
	Where  string // table and the chain that packets come through, from hook to rule
	Rule   string // the rule's text
	Reason string
}

// activation is one way in which packets come into a chain.
type activation struct {
	chain  *chain
	parent *activation
	via    *rule
	key    string // branch of via
	m      match
	v6     bool
	hook   uint8
	depth  int
	root   *activation
	kids   map[*rule]map[string]*activation
	outs   map[*rule][]*entry
}

// entry is a rule that decides, reached in one way.
type entry struct {
	act     *activation
	rule    *rule
	key     string
	m       match
	end     branchEnd
	problem string // why it cannot be published
	wide    bool
}

type slotID struct {
	v6   bool
	slot port.Slot
}

type wideID struct {
	v6   bool
	hook uint8
}

// compiler keeps the ruleset and what follows from it. It is owned by one goroutine.
type compiler struct {
	maxPorts int
	host     host
	env      env

	tables map[tableID]*table
	slots  map[slotID][]*entry
	wide   map[wideID][]*entry
	bad    map[*entry]struct{} // those with a problem

	dirtyRules map[*rule]struct{}
	dirtyElems map[*namedSet]map[string]struct{}
	dirtyChain map[*chain]struct{} // base chains that came or changed
	dirtySlots map[slotID]struct{}
	dirtyWide  map[wideID]struct{}
	callers    map[chainID]map[*rule]int // rules that jump to a chain, and by how many branches
	inert      map[*chain]bool

	published  map[slotID][]port.Binding
	count      int      // of what is published
	holes      []*chain // with rules that are gone
	badChanged bool     // since problems was last asked
	evals      int      // rules evaluated since the start
	missing    bool     // the last commit read a set whose elements are not known
}

func newCompiler(maxPorts int) *compiler {
	return &compiler{
		maxPorts:   maxPorts,
		tables:     make(map[tableID]*table),
		slots:      make(map[slotID][]*entry),
		wide:       make(map[wideID][]*entry),
		bad:        make(map[*entry]struct{}),
		dirtyRules: make(map[*rule]struct{}),
		dirtyElems: make(map[*namedSet]map[string]struct{}),
		dirtyChain: make(map[*chain]struct{}),
		dirtySlots: make(map[slotID]struct{}),
		dirtyWide:  make(map[wideID]struct{}),
		callers:    make(map[chainID]map[*rule]int),
		inert:      make(map[*chain]bool),
		published:  make(map[slotID][]port.Binding),
	}
}

// setHost says what the machine is like now; if that changed, everything is worked out again.
func (c *compiler) setHost(h host) {
	if c.host.equal(&h) {
		return
	}
	c.host = h
	c.env = env{links: h.links}
	for _, t := range c.tables {
		for _, ch := range t.chains {
			for _, r := range ch.rules {
				c.touch(r)
			}
			if ch.hook.nat() {
				c.dirtyChain[ch] = struct{}{}
			}
		}
	}
	for id := range c.slots {
		c.dirtySlots[id] = struct{}{}
	}
}

// ---- changes to the ruleset ----

func (c *compiler) table(id tableID) *table {
	t := c.tables[id]
	if t == nil {
		t = &table{id: id, chains: make(map[string]*chain), sets: make(map[string]*namedSet)}
		c.tables[id] = t
	}
	return t
}

func (c *compiler) dropTable(id tableID) {
	t := c.tables[id]
	if t == nil {
		return
	}
	for _, ch := range t.chains {
		c.dropChain(ch)
	}
	delete(c.tables, id)
}

// ownedTables returns the tables that go with a program's socket.
func (c *compiler) ownedTables() (out []tableID) {
	for id, t := range c.tables {
		if t.owned {
			out = append(out, id)
		}
	}
	return out
}

func (c *compiler) setDormant(t *table, dormant bool) {
	if t.dormant == dormant {
		return
	}
	t.dormant = dormant
	for _, ch := range t.chains {
		if ch.hook.nat() {
			c.dirtyChain[ch] = struct{}{}
		}
	}
}

func (c *compiler) putChain(t *table, name string, hook *hookPoint) *chain {
	ch := t.chains[name]
	if ch == nil {
		ch = &chain{table: t, name: name, hook: hook}
		t.chains[name] = ch
		c.dirtyChain[ch] = struct{}{}
		for r := range c.callers[chainID{t.id, name}] {
			c.touch(r)
		}
	} else if !sameHook(ch.hook, hook) {
		ch.hook = hook
		c.dirtyChain[ch] = struct{}{}
	}
	return ch
}

func (c *compiler) dropChain(ch *chain) {
	for len(ch.acts) > 0 {
		c.leave(ch.acts[len(ch.acts)-1])
	}
	for _, r := range ch.rules {
		c.forget(r)
	}
	ch.rules = nil
	delete(c.dirtyChain, ch)
	delete(c.inert, ch)
	delete(ch.table.chains, ch.name)
	for r := range c.callers[chainID{ch.table.id, ch.name}] {
		c.touch(r)
	}
}

// insertRule puts a rule at index at.
func (c *compiler) insertRule(ch *chain, at int, handle uint64, raw []byte) {
	r := &rule{chain: ch, handle: handle, raw: raw}
	ch.rules = slices.Insert(ch.rules, at, r)
	ch.renumber(at)
	ch.learn(r)
	c.touch(r)
}

// removeRule takes a rule out; its place is closed by tidy, so that a deletion
// of many costs little and a position that names it can still be found.
func (c *compiler) removeRule(r *rule) {
	c.forget(r)
	r.gone = true
	if !r.chain.holes {
		r.chain.holes = true
		c.holes = append(c.holes, r.chain)
	}
}

// tidy closes the places of rules that are gone.
func (c *compiler) tidy() {
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

// touch marks a rule to be worked out again.
func (c *compiler) touch(r *rule) { c.dirtyRules[r] = struct{}{} }

// forget removes all that came from a rule.
func (c *compiler) forget(r *rule) {
	for _, a := range r.chain.acts {
		c.clearRule(a, r)
	}
	c.unread(r)
	delete(c.dirtyRules, r)
	c.inertChanged(r.chain)
}

// unread takes back a rule's evaluations.
func (c *compiler) unread(r *rule) {
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
func (c *compiler) putSet(t *table, n *nset) (set *namedSet, fresh bool) {
	old := t.sets[n.name]
	if old != nil && old.handle == n.handle && old.flags == n.flags && old.keyLen == n.keyLen && old.dataLen == n.dataLen && old.dataType == n.dataType {
		return old, false
	}
	if old != nil {
		c.dropSet(t, n.name)
	}
	set = &namedSet{nset: *n, users: make(map[*rule]struct{})}
	if set.elems == nil {
		set.elems = make(map[string]element)
	}
	t.sets[n.name] = set
	return set, true
}

func (c *compiler) dropSet(t *table, name string) {
	n := t.sets[name]
	if n == nil {
		return
	}
	for r := range n.users {
		c.touch(r)
	}
	delete(c.dirtyElems, n)
	delete(t.sets, name)
}

func (c *compiler) putElem(n *namedSet, e element) {
	id := e.id()
	if old, ok := n.elems[id]; ok && old.equal(e) {
		return
	}
	n.elems[id] = e
	c.touchElem(n, id)
}

func (c *compiler) dropElem(n *namedSet, id string) {
	if _, ok := n.elems[id]; !ok {
		return
	}
	delete(n.elems, id)
	c.touchElem(n, id)
}

func (c *compiler) touchElem(n *namedSet, id string) {
	m := c.dirtyElems[n]
	if m == nil {
		m = make(map[string]struct{})
		c.dirtyElems[n] = m
	}
	m[id] = struct{}{}
}

// sync makes the tables that scope accepts equal to snap, changing only what differs.
// It returns how many objects differed.
func (c *compiler) sync(snap *snapshot, scope func(tableID) bool) int {
	c.tidy()
	n := 0
	want := make(map[tableID]*tableSnap)
	for _, t := range snap.tables {
		want[t.id] = t
	}
	for id := range c.tables {
		if scope(id) && want[id] == nil {
			c.dropTable(id)
			n++
		}
	}
	for _, ts := range snap.tables {
		t := c.table(ts.id)
		if t.dormant != ts.dormant {
			n++
		}
		t.handle, t.owned = ts.handle, ts.owned
		c.setDormant(t, ts.dormant)
		n += c.syncSets(t, ts)
		chains := make(map[string]*chainSnap)
		for _, cs := range ts.chains {
			chains[cs.name] = cs
		}
		for name, ch := range t.chains {
			if chains[name] == nil {
				c.dropChain(ch)
				n++
			}
		}
		for _, cs := range ts.chains {
			if old := t.chains[cs.name]; old == nil || !sameHook(old.hook, cs.hook) {
				n++
			}
			n += c.syncRules(c.putChain(t, cs.name, cs.hook), cs.rules)
		}
	}
	return n
}

func (c *compiler) syncSets(t *table, ts *tableSnap) int {
	n := 0
	want := make(map[string]*nset)
	for _, s := range ts.sets {
		want[s.name] = s
	}
	// Sets that no rule reads do not matter: hooks tell of them only when one does.
	for name, have := range t.sets {
		if want[name] == nil {
			if len(have.users) > 0 {
				n++
			}
			c.dropSet(t, name)
		}
	}
	for _, s := range ts.sets {
		elems := s.elems
		have, _ := c.putSet(t, &nset{name: s.name, handle: s.handle, flags: s.flags, keyLen: s.keyLen, dataLen: s.dataLen, dataType: s.dataType})
		if s.blank || have.changing() {
			if len(have.users) == 0 {
				have.blank, have.elems = s.blank, make(map[string]element)
			}
			continue // what is in it does not matter
		}
		known := !have.blank && len(have.users) > 0
		if have.blank {
			have.blank = false
			for r := range have.users {
				c.touch(r)
			}
		}
		differ := 0
		for id := range have.elems {
			if _, ok := elems[id]; !ok {
				c.dropElem(have, id)
				differ++
			}
		}
		for id, e := range elems {
			if old, ok := have.elems[id]; !ok || !old.equal(e) {
				differ++
			}
			c.putElem(have, e)
		}
		if known {
			n += differ
		}
	}
	return n
}

func sameRule(r *rule, s ruleSnap) bool {
	return r.handle == s.handle && string(r.raw) == string(s.raw)
}

// syncRules keeps the longest equal beginning and end, and every rule between
// them whose handle and bytes stay in the same order.
func (c *compiler) syncRules(ch *chain, want []ruleSnap) int {
	head := 0
	for head < len(ch.rules) && head < len(want) && sameRule(ch.rules[head], want[head]) {
		head++
	}
	tail := 0
	for tail < len(ch.rules)-head && tail < len(want)-head &&
		sameRule(ch.rules[len(ch.rules)-1-tail], want[len(want)-1-tail]) {
		tail++
	}
	oldMid := slices.Clone(ch.rules[head : len(ch.rules)-tail])
	newMid := want[head : len(want)-tail]
	if len(oldMid) == 0 && len(newMid) == 0 {
		return 0
	}
	// Pair equal rules greedily in order.
	type ident struct {
		handle uint64
		raw    string
	}
	at := make(map[ident][]int)
	for i, r := range oldMid {
		k := ident{r.handle, string(r.raw)}
		at[k] = append(at[k], i)
	}
	n := 0
	last := -1
	mid := make([]*rule, 0, len(newMid))
	kept := make([]bool, len(oldMid))
	for _, s := range newMid {
		k := ident{s.handle, string(s.raw)}
		found := -1
		for len(at[k]) > 0 {
			i := at[k][0]
			at[k] = at[k][1:]
			if i > last {
				found = i
				break
			}
		}
		if found >= 0 {
			last, kept[found] = found, true
			mid = append(mid, oldMid[found])
			continue
		}
		n++
		mid = append(mid, &rule{chain: ch, handle: s.handle, raw: s.raw})
	}
	for i, r := range oldMid {
		if !kept[i] {
			c.forget(r)
			if ch.index[r.handle] == r {
				delete(ch.index, r.handle)
			}
			n++
		}
	}
	ch.rules = slices.Concat(ch.rules[:head:head], mid, ch.rules[len(ch.rules)-tail:])
	ch.renumber(head)
	for _, r := range mid {
		ch.learn(r)
		if r.eval == [2]*evaluation{} {
			c.touch(r)
		}
	}
	return n
}

// ---- working out ----

func (c *compiler) evaluation(r *rule, v6 bool) *evaluation {
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
		c.missing = c.missing || n.blank
	}
	for _, b := range e.branches {
		c.calls(r, b, 1)
	}
	return e
}

// calls counts a branch of r that jumps, or takes it back.
func (c *compiler) calls(r *rule, b *branch, n int) {
	if b.end.chain == "" {
		return
	}
	id := chainID{r.chain.table.id, b.end.chain}
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

// isInert reports whether nothing in ch jumps or decides, as in chains that only mark.
func (c *compiler) isInert(ch *chain) bool {
	if v, ok := c.inert[ch]; ok {
		return v
	}
	v := true
	for _, r := range ch.rules {
		// Both families, so that one answer serves both.
		for _, six := range []bool{false, true} {
			if ch.table.id.family == famIP && six || ch.table.id.family == famIP6 && !six {
				continue
			}
			if !c.evaluation(r, six).inert {
				v = false
			}
		}
		if !v {
			break
		}
	}
	c.inert[ch] = v
	return v
}

// inertChanged asks again whether ch matters to those who jump to it.
func (c *compiler) inertChanged(ch *chain) {
	if v, ok := c.inert[ch]; ok && v {
		for r := range c.callers[chainID{ch.table.id, ch.name}] {
			c.touch(r)
		}
	}
	delete(c.inert, ch)
}

// enter begins to walk packets m through ch.
func (c *compiler) enter(a *activation) {
	a.kids = make(map[*rule]map[string]*activation)
	a.outs = make(map[*rule][]*entry)
	a.chain.acts = append(a.chain.acts, a)
	for _, r := range a.chain.rules {
		c.addRule(a, r, nil)
	}
}

// leave takes back an activation and all below it.
func (c *compiler) leave(a *activation) {
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

func (c *compiler) clearRule(a *activation, r *rule) {
	c.dropEntries(a, r, nil)
	for k, kid := range a.kids[r] {
		delete(a.kids[r], k)
		c.leave(kid)
	}
	delete(a.kids, r)
}

// clearBranches takes back what came from some branches of r.
func (c *compiler) clearBranches(a *activation, r *rule, keys map[string]struct{}) {
	c.dropEntries(a, r, keys)
	for k := range keys {
		if kid := a.kids[r][k]; kid != nil {
			delete(a.kids[r], k)
			c.leave(kid)
		}
	}
}

// addRule adds what r, or only some branches of it, does to packets of a.
func (c *compiler) addRule(a *activation, r *rule, only map[string]struct{}) {
	ev := c.evaluation(r, a.v6)
	add := func(key string, b *branch) {
		m := a.m.and(b.m, a.v6)
		if m.dead() || !c.reachesHost(&m, a.v6) {
			return
		}
		c.addBranch(a, r, key, m, b.end)
	}
	if only != nil {
		for k := range only {
			if b := ev.branches[k]; b != nil {
				add(k, b)
			}
		}
	} else {
		for k, b := range ev.branches {
			add(k, b)
		}
	}
	if ev.tooMany {
		m := a.m
		m.opaque = append(slices.Clip(m.opaque), "too many combinations")
		c.addEntry(&entry{act: a, rule: r, m: m, end: branchEnd{kind: endUnknown}, problem: "too many combinations"})
	}
}

func (c *compiler) addBranch(a *activation, r *rule, key string, m match, end branchEnd) {
	e := &entry{act: a, rule: r, key: key, m: m, end: end}
	switch end.kind {
	case endJump, endGoto:
		to := r.chain.table.chains[end.chain]
		// Without a chain there is nothing to say yet; putChain asks again.
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
			kid := &activation{chain: to, parent: a, via: r, key: key, m: m, v6: a.v6, hook: a.hook, depth: a.depth + 1, root: a.root}
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
	case endNat:
		ports := portCount(m.dport)
		switch {
		case len(m.opaque) > 0:
			e.problem = "condition not understood: " + strings.Join(m.opaque, ", ")
		case m.marked:
			e.problem = "condition not understood: a packet mark or a related connection"
		case end.why != "":
			e.problem = "target not understood: " + end.why
		case ports > c.maxPorts:
			e.problem = fmt.Sprintf("matches %d ports, more than %d", ports, c.maxPorts)
		}
	case endUnknown:
		e.m.opaque = append(slices.Clip(m.opaque), end.why)
	}
	c.addEntry(e)
}

func (c *compiler) eachSlot(e *entry, f func(slotID)) {
	for _, r := range e.m.dport {
		for p := max(int(r.lo), 1); p <= int(r.hi); p++ {
			if e.m.proto&bitTCP != 0 {
				f(slotID{e.act.v6, port.Slot{Protocol: port.TCP, Port: uint16(p)}})
			}
			if e.m.proto&bitUDP != 0 {
				f(slotID{e.act.v6, port.Slot{Protocol: port.UDP, Port: uint16(p)}})
			}
		}
	}
}

func (c *compiler) addEntry(e *entry) {
	limit := narrowPorts
	if e.end.kind == endNat && e.problem == "" {
		limit = c.maxPorts
	}
	e.wide = portCount(e.m.dport) > limit
	if e.wide {
		id := wideID{e.act.v6, e.act.hook}
		c.wide[id] = append(c.wide[id], e)
		c.dirtyWide[id] = struct{}{}
	} else {
		c.eachSlot(e, func(id slotID) {
			c.slots[id] = append(c.slots[id], e)
			c.dirtySlots[id] = struct{}{}
		})
	}
	if e.problem != "" {
		c.bad[e] = struct{}{}
		c.badChanged = true
	}
	e.act.outs[e.rule] = append(e.act.outs[e.rule], e)
}

func (c *compiler) dropEntries(a *activation, r *rule, keys map[string]struct{}) {
	keep := a.outs[r][:0:0]
	for _, e := range a.outs[r] {
		if keys != nil {
			if _, ok := keys[e.key]; !ok {
				keep = append(keep, e)
				continue
			}
		}
		if e.wide {
			id := wideID{a.v6, a.hook}
			c.wide[id] = without(c.wide[id], e)
			c.dirtyWide[id] = struct{}{}
		} else {
			c.eachSlot(e, func(id slotID) {
				if s := without(c.slots[id], e); len(s) > 0 {
					c.slots[id] = s
				} else {
					delete(c.slots, id)
				}
				c.dirtySlots[id] = struct{}{}
			})
		}
		c.unbad(e)
	}
	if len(keep) > 0 {
		a.outs[r] = keep
	} else {
		delete(a.outs, r)
	}
}

func without(s []*entry, e *entry) []*entry {
	if i := slices.Index(s, e); i >= 0 {
		s[i] = s[len(s)-1]
		s[len(s)-1] = nil
		return s[:len(s)-1]
	}
	return s
}

func (c *compiler) unbad(e *entry) {
	if _, ok := c.bad[e]; ok {
		delete(c.bad, e)
		c.badChanged = true
	}
}

// commit works out what changed and returns it as one step.
func (c *compiler) commit() port.Change {
	c.missing = false
	c.tidy()
	for round := 0; len(c.dirtyElems)+len(c.dirtyRules)+len(c.dirtyChain) > 0 && round < 4*maxDepth; round++ {
		c.commitElems()
		rules := c.dirtyRules
		c.dirtyRules = make(map[*rule]struct{})
		for r := range rules {
			for _, a := range r.chain.acts {
				c.clearRule(a, r)
			}
			c.unread(r)
			c.inertChanged(r.chain)
		}
		chains := c.dirtyChain
		c.dirtyChain = make(map[*chain]struct{})
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

// commitElems works out elements that came or went, alone where that is enough.
func (c *compiler) commitElems() {
	sets := c.dirtyElems
	c.dirtyElems = make(map[*namedSet]map[string]struct{})
	for n, ids := range sets {
		for r := range n.users {
			if _, ok := c.dirtyRules[r]; ok {
				continue
			}
			if !c.patchRule(r, n, ids) {
				c.touch(r)
			}
		}
	}
}

// patchRule works out only the branches of some elements of n.
func (c *compiler) patchRule(r *rule, n *namedSet, ids map[string]struct{}) bool {
	keys := make(map[string]struct{}, len(ids))
	for id := range ids {
		keys[id+";"] = struct{}{}
	}
	for _, e := range r.eval {
		if e != nil && (e.split != n || e.tooMany || n.hasCatchall()) {
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

// root walks a base chain anew, for each family that its table serves.
func (c *compiler) root(ch *chain) {
	for _, a := range slices.Clone(ch.acts) {
		if a.parent == nil {
			c.leave(a)
		}
	}
	if ch.table.chains[ch.name] != ch || !ch.hook.nat() || ch.table.dormant {
		return
	}
	for _, v6 := range []bool{false, true} {
		if ch.table.id.family == famIP && v6 || ch.table.id.family == famIP6 && !v6 {
			continue
		}
		m := everything()
		if ch.hook.num == hookOutput {
			m.iif, m.oif, m.src = ifaceIn(false, ""), ifaceIn(false, c.loopbacks()...), srcLocal
		} else {
			// What begins here comes in over the loopback with its destination decided
			// in the output hook, where the kernel has its own if no rule does.
			m.iif, m.oif = ifaceIn(true, c.loopbacks()...), ifaceIn(false, "")
		}
		a := &activation{chain: ch, m: m, v6: v6, hook: uint8(ch.hook.num)}
		a.root = a
		c.enter(a)
	}
}

func (c *compiler) loopbacks() []string {
	if len(c.host.loopback) == 0 {
		return []string{"lo"}
	}
	return slices.Clone(c.host.loopback)
}

// reachesHost reports whether m matches some address of this machine.
func (c *compiler) reachesHost(m *match, v6 bool) bool {
	return mostAddrs(m.daddr) || len(c.localKeys(m.daddr, v6, 1)) > 0
}

// localKeys returns own addresses in s, at most limit.
func (c *compiler) localKeys(s set[netip.Addr], v6 bool, limit int) []netip.Addr {
	o := addrOrderOf(v6)
	var out []netip.Addr
	lo := port.Loopback(o.min)
	for _, p := range c.host.local {
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

// ---- publishing ----

func (c *compiler) publish() port.Change {
	for id := range c.dirtyWide {
		for s := range c.slots {
			if s.v6 == id.v6 {
				c.dirtySlots[s] = struct{}{}
			}
		}
		delete(c.dirtyWide, id)
	}
	var ch port.Change
	for id := range c.dirtySlots {
		now := c.slotBindings(id)
		was := c.published[id]
		for _, b := range was {
			if !slices.ContainsFunc(now, func(n port.Binding) bool { return n.Origin == b.Origin }) {
				ch.Drop = append(ch.Drop, b.Origin)
			}
		}
		for _, b := range now {
			if !slices.ContainsFunc(was, func(w port.Binding) bool { return sameBinding(w, b) }) {
				ch.Put = append(ch.Put, b)
			}
		}
		c.count += len(now) - len(was)
		if len(now) > 0 {
			c.published[id] = now
		} else {
			delete(c.published, id)
		}
		delete(c.dirtySlots, id)
	}
	slices.SortFunc(ch.Put, func(a, b port.Binding) int { return cmp.Compare(a.Origin.ID, b.Origin.ID) })
	slices.SortFunc(ch.Drop, func(a, b port.Origin) int { return cmp.Compare(a.ID, b.ID) })
	return ch
}

func sameBinding(a, b port.Binding) bool {
	return a.Origin == b.Origin && a.Key == b.Key && a.Withheld == b.Withheld && a.Inner == b.Inner && a.Maker == b.Maker && a.Detail == b.Detail &&
		slices.Equal(a.Dial, b.Dial) && a.Hints.Equal(b.Hints)
}

// incomplete reports whether the last commit needed a set whose elements were not
// read, because no packet could get there before.
func (c *compiler) incomplete() bool { return c.missing }

// counts returns how many bindings there are, and how many rules were evaluated
// since the start.
func (c *compiler) counts() (bindings, evaluated int) { return c.count, c.evals }

// bindings returns everything that is published, sorted by origin.
func (c *compiler) bindings() []port.Binding {
	out := []port.Binding{}
	for _, b := range c.published {
		out = append(out, b...)
	}
	slices.SortFunc(out, func(a, b port.Binding) int { return cmp.Compare(a.Origin.ID, b.Origin.ID) })
	return out
}

// problemsChanged reports whether what problems returns may have changed since
// this was last asked.
func (c *compiler) problemsChanged() bool {
	changed := c.badChanged
	c.badChanged = false
	return changed
}

// problems returns what is not understood, sorted, at most limit, and how many there are.
func (c *compiler) problems(limit int) ([]Problem, int) {
	seen := make(map[Problem]struct{})
	for e := range c.bad {
		seen[Problem{Where: e.where(), Rule: ruleText(e.rule), Reason: e.problem}] = struct{}{}
	}
	out := slices.SortedFunc(maps.Keys(seen), func(a, b Problem) int {
		return cmp.Or(cmp.Compare(a.Where, b.Where), cmp.Compare(a.Rule, b.Rule), cmp.Compare(a.Reason, b.Reason))
	})
	return out[:min(limit, len(out))], len(out)
}

// where names the way from the hook to the rule.
func (e *entry) where() string {
	var names []string
	for a := e.act; a != nil; a = a.parent {
		names = append(names, a.chain.name)
	}
	slices.Reverse(names)
	return e.rule.chain.table.id.String() + " " + strings.Join(names, " > ")
}

// before orders entries of one hook as packets meet them.
func (e *entry) before(f *entry) int {
	if e.act.root != f.act.root {
		a, b := e.act.root.chain, f.act.root.chain
		legacy := func(c *chain) int {
			if c.table.id.legacy {
				return 1
			}
			return 0
		}
		return cmp.Or(cmp.Compare(a.hook.prio, b.hook.prio), cmp.Compare(legacy(a), legacy(b)),
			cmp.Compare(a.table.id.String(), b.table.id.String()), cmp.Compare(a.name, b.name))
	}
	var pe, pf [maxDepth + 2]int
	a, b := e.path(pe[:0]), f.path(pf[:0])
	if c := slices.Compare(a, b); c != 0 {
		// The end of a goto comes after what it leads to.
		if n := min(len(a), len(b)); slices.Equal(a[:n], b[:n]) {
			return -c
		}
		return c
	}
	if e.act == f.act {
		return cmp.Compare(e.key, f.key)
	}
	return slices.Compare(e.keys(), f.keys())
}

// keys names the branches on the way to e, to order entries that packets meet
// by choice and not in turn.
func (e *entry) keys() []string {
	out := []string{e.key}
	for a := e.act; a.parent != nil; a = a.parent {
		out = append(out, a.key)
	}
	slices.Reverse(out)
	return out
}

func (e *entry) path(p []int) []int {
	p = append(p, e.rule.pos)
	for a := e.act; a.parent != nil; a = a.parent {
		p = append(p, a.via.pos)
	}
	slices.Reverse(p)
	return p
}

// hides reports whether what e decides can keep packets from a later entry f.
func (e *entry) hides(f *entry) bool {
	switch e.end.kind {
	case endReturn:
		for a := f.act; a != nil; a = a.parent {
			if a == e.act {
				return true
			}
		}
		return false
	case endAccept:
		return e.act.root == f.act.root
	}
	return true
}

// hookEntries returns the entries that packets for a slot meet at a hook, in order.
func (c *compiler) hookEntries(id slotID, hook uint8) (list []*entry, crowded bool) {
	bit := protoBit(byte(id.slot.Protocol))
	wide := c.wide[wideID{id.v6, hook}]
	crowded = len(wide) > maxWide
	if !crowded {
		for _, e := range wide {
			if e.m.proto&bit != 0 && portOrder.contains(e.m.dport, id.slot.Port) {
				list = append(list, e)
			}
		}
	}
	for _, e := range c.slots[id] {
		if e.act.hook == hook {
			list = append(list, e)
		}
	}
	slices.SortFunc(list, (*entry).before)
	return list, crowded
}

type bindingKey struct {
	table tableID
	addr  netip.Addr
}

type draft struct {
	first    *entry
	free     bool
	outer    bool // connections from outside meet it
	withheld string
	targets  []netip.AddrPort
}

// slotBindings works out one port of one protocol and family.
func (c *compiler) slotBindings(id slotID) []port.Binding {
	if len(c.slots[id]) == 0 {
		return nil
	}
	one := portOrder.one(id.slot.Port)
	bit := protoBit(byte(id.slot.Protocol))
	drafts := make(map[bindingKey]*draft)
	var out [2][]*entry
	for i, hook := range []uint8{hookPrerouting, hookOutput} {
		list, crowded := c.hookEntries(id, hook)
		out[i] = list
		if len(list) > maxSlotEntries {
			list, crowded = list[:maxSlotEntries], true
		}
		for at, e := range list {
			if e.end.kind != endNat || e.problem != "" || e.end.nat == nil {
				continue
			}
			m := e.m
			m.dport, m.proto = one, bit
			hidden := ""
			for _, f := range list[:at] {
				if f.rule == e.rule && f.act == e.act || !f.hides(e) || !f.m.overlaps(&m, id.v6) {
					continue
				}
				if f.m.marked {
					continue
				}
				if len(f.m.opaque) > 0 {
					hidden = "may be decided by an earlier rule that is not understood: " + ruleText(f.rule)
					continue
				}
				if m = f.m.minus(&m, id.v6); m.dead() {
					break
				}
			}
			if m.dead() {
				continue
			}
			if hidden == "" && crowded {
				hidden = "too many rules come before it"
			}
			c.draft(drafts, id, e, &m, hidden)
		}
	}
	return c.finish(id, drafts, out[1])
}

func (c *compiler) draft(drafts map[bindingKey]*draft, id slotID, e *entry, m *match, hidden string) {
	o := addrOrderOf(id.v6)
	keys := []netip.Addr{o.min}
	if !mostAddrs(m.daddr) {
		keys = c.localKeys(m.daddr, id.v6, maxKeys)
	}
	withheld := hidden
	if withheld == "" {
		withheld = c.limits(e, m)
	}
	for _, k := range keys {
		bk := bindingKey{e.rule.chain.table.id, k}
		d := drafts[bk]
		if d == nil {
			d = &draft{first: e, withheld: withheld}
			drafts[bk] = d
		}
		if withheld == "" && !d.free {
			d.first, d.free, d.withheld = e, true, ""
		}
		d.outer = d.outer || withheld == "" && e.act.hook == hookPrerouting
		for _, t := range e.end.nat.targets(k, id.slot.Port) {
			if !slices.Contains(d.targets, t) && len(d.targets) < maxDial {
				d.targets = append(d.targets, t)
			}
		}
	}
}

// limits says what keeps a match from being open to all, or "".
func (c *compiler) limits(e *entry, m *match) string {
	if !mostAddrs(m.saddr) {
		return "limited to source " + addrsText(m.saddr)
	}
	if m.clients != "" {
		return "limited to sources in " + m.clients
	}
	if e.act.hook == hookOutput {
		return ""
	}
	if m.src == srcLocal {
		return "limited to local sources"
	}
	if !m.iif.limited {
		return ""
	}
	for _, n := range c.host.uplinks {
		if m.iif.contains(n) {
			return ""
		}
	}
	if m.iif.not {
		for _, n := range c.host.uplinks {
			if !m.iif.contains(n) {
				return "excludes interface " + n + ", which carries the default route"
			}
		}
		return ""
	}
	return "limited to interface " + strings.Join(m.iif.names, ", ")
}

// finish makes bindings of drafts; output is what local connections meet.
func (c *compiler) finish(id slotID, drafts map[bindingKey]*draft, output []*entry) []port.Binding {
	out := make([]port.Binding, 0, len(drafts))
	for k, d := range drafts {
		key := port.Key{Protocol: id.slot.Protocol, Address: k.addr, Port: id.slot.Port}
		b := port.Binding{
			Key:      key,
			Origin:   port.Origin{Source: sourceName, ID: k.table.String() + " " + key.String()},
			Withheld: d.withheld,
			Inner:    d.free && !d.outer,
			Maker:    d.first.rule.maker(),
			Hints:    port.Hints{Targets: d.targets},
			Detail:   d.first.where() + ": " + ruleText(d.first.rule),
		}
		targets := d.targets
		for _, a := range c.dialAddrs(k.addr, id.v6) {
			if !c.answers(output, a, id.v6, k.table) {
				continue
			}
			own := netip.AddrPortFrom(a, id.slot.Port)
			if a.IsLoopback() && slices.ContainsFunc(targets, func(t netip.AddrPort) bool { return !t.Addr().IsLoopback() }) {
				// What leaves the machine with a loopback source needs route_localnet,
				// or is lost without an answer.
				targets = append(slices.Clone(targets), own)
			} else {
				targets = append([]netip.AddrPort{own}, targets...)
			}
			break
		}
		for _, t := range targets {
			if !slices.Contains(b.Dial, t) && len(b.Dial) < maxDial {
				b.Dial = append(b.Dial, t)
			}
		}
		out = append(out, b)
	}
	slices.SortFunc(out, func(a, b port.Binding) int { return cmp.Compare(a.Origin.ID, b.Origin.ID) })
	return out
}

// dialAddrs returns own addresses under which a publication can be tried. A node
// address comes first: a connection from 127.0.0.1 that is sent on to another
// machine needs route_localnet, and one from ::1 never gets there.
func (c *compiler) dialAddrs(key netip.Addr, v6 bool) []netip.Addr {
	if !key.IsUnspecified() {
		return []netip.Addr{key}
	}
	var out []netip.Addr
	for _, a := range c.host.nodes {
		if a.Is4() != v6 {
			out = append(out, a)
		}
	}
	return append(out, port.Loopback(key))
}

// answers reports whether a connection from this machine to its address a is
// certain to be sent on by a rule of table t.
func (c *compiler) answers(output []*entry, a netip.Addr, v6 bool, t tableID) bool {
	found := false
	var left []*activation // chains that the packet returned from
	for _, e := range output {
		if !e.m.local(a, v6) || e.m.marked {
			continue
		}
		if slices.ContainsFunc(left, func(a *activation) bool { return e.within(a) }) {
			continue
		}
		if len(e.m.opaque) > 0 {
			return false
		}
		switch e.end.kind {
		case endNat:
			if e.problem != "" || e.rule.chain.table.id != t {
				return false
			}
			found = found || e.m.clients == ""
			if !e.m.maybe {
				return true
			}
		case endReturn:
			if !e.m.maybe {
				left = append(left, e.act)
			}
		case endAccept:
			if !e.m.maybe {
				left = append(left, e.act.root)
			}
		case endDrop:
			return false
		}
	}
	return found
}

func (e *entry) within(a *activation) bool {
	for x := e.act; x != nil; x = x.parent {
		if x == a {
			return true
		}
	}
	return false
}

func addrsText(s set[netip.Addr]) string {
	var out []string
	for i, r := range s {
		if i == 4 {
			out = append(out, "…")
			break
		}
		out = append(out, addrRange{r.lo, r.hi}.String())
	}
	return strings.Join(out, ", ")
}
