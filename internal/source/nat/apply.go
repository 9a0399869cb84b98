// SPDX-License-Identifier: Apache-2.0

package nat

import "fmt"

// errUnknown says that a notification speaks of something that the model does
// not have, so that only a dump can tell the truth.
var errUnknown = fmt.Errorf("a notification does not fit the model")

// mirror applies notifications of nftables to a compiler's model.
type mirror struct {
	c      *compiler
	gen    uint32
	others map[tableID]struct{} // tables that have no nat base chain
	fresh  map[tableID]struct{} // tables that the commit being read has made
	doubt  bool                 // the order of rules should be checked by a dump
	last   *rule                // that was deleted by the message before
}

func (m *mirror) ignored(t tableID) bool {
	_, ok := m.others[t]
	return ok
}

func (m *mirror) set(t tableID, name string) (handle uint64, elements, ok bool) {
	if t := m.c.tables[t]; t != nil && t.sets[name] != nil {
		n := t.sets[name]
		return n.handle, !n.blank, true
	}
	return 0, false, false
}

// generation returns that of the last commit that was applied or loaded.
func (m *mirror) generation() uint32 { return m.gen }

// orderDoubtful reports whether the messages since this was last asked leave the
// order of rules in doubt, so that a dump should confirm it.
func (m *mirror) orderDoubtful() bool {
	doubt := m.doubt
	m.doubt = false
	return doubt
}

func nextGen(g uint32) uint32 {
	if g++; g == 0 {
		g = 1 // the kernel skips 0 (nf_tables_commit)
	}
	return g
}

// load makes the model equal to a dump and returns how many objects differed.
func (m *mirror) load(s *snapshot) int {
	m.gen = s.gen
	m.others = make(map[tableID]struct{}, len(s.others))
	for _, id := range s.others {
		m.others[id] = struct{}{}
	}
	m.fresh = make(map[tableID]struct{})
	m.doubt = false
	return m.c.sync(s, func(id tableID) bool { return !id.legacy })
}

// commit applies the messages of one commit, whose generation is gen, to the
// model. The compiler's commit is still to be called.
func (m *mirror) commit(msgs []*message, gen uint32) error {
	if int32(gen-m.gen) <= 0 {
		return nil // the dump has it
	}
	if gen != nextGen(m.gen) {
		return fmt.Errorf("%w: generation %d after %d", errUnknown, gen, m.gen)
	}
	m.last = nil
	for _, msg := range msgs {
		if msg.table.family == 0 {
			continue
		}
		last := m.last
		if err := m.apply(msg); err != nil {
			return err
		}
		if m.last == last {
			m.last = nil
		}
	}
	for id := range m.fresh {
		delete(m.fresh, id)
		t := m.c.tables[id]
		if t == nil {
			continue
		}
		nat := false
		for _, ch := range t.chains {
			nat = nat || ch.hook.nat()
		}
		if !nat {
			m.c.dropTable(id)
			m.others[id] = struct{}{}
		}
	}
	m.gen = gen
	return nil
}

func (m *mirror) apply(msg *message) error {
	c := m.c
	unknown := func(what string) error {
		return fmt.Errorf("%w: %s of table %s", errUnknown, what, msg.table)
	}
	switch msg.typ {
	case msgDelTable:
		c.dropTable(msg.table)
		delete(m.others, msg.table)
		delete(m.fresh, msg.table)
		return nil
	case msgNewTable:
		if t := c.tables[msg.table]; t != nil && t.handle != 0 && msg.handle != 0 && t.handle != msg.handle {
			c.dropTable(msg.table) // it went with its owner, of which nothing was said
		}
		if _, ok := m.others[msg.table]; ok {
			return nil
		}
		if c.tables[msg.table] == nil {
			m.fresh[msg.table] = struct{}{}
		}
		t := c.table(msg.table)
		t.handle, t.owned = msg.handle, msg.owned()
		c.setDormant(t, msg.flags&tableDormant != 0)
		return nil
	}
	t := c.tables[msg.table]
	if t == nil {
		if _, ok := m.others[msg.table]; !ok {
			return unknown("an object")
		}
		if msg.typ == msgNewChain && msg.hook.nat() {
			return unknown("a first nat chain")
		}
		return nil
	}
	switch msg.typ {
	case msgNewChain:
		hook := msg.hook
		if old := t.chains[msg.chain]; old != nil && hook == nil {
			hook = old.hook
		}
		c.putChain(t, msg.chain, hook)
	case msgDelChain:
		ch := t.chains[msg.chain]
		if ch == nil {
			return unknown("chain " + msg.chain)
		}
		c.dropChain(ch)
	case msgNewRule:
		ch := t.chains[msg.chain]
		if ch == nil {
			return unknown("chain " + msg.chain)
		}
		return m.newRule(ch, msg)
	case msgDelRule:
		ch := t.chains[msg.chain]
		if ch == nil {
			return unknown("chain " + msg.chain)
		}
		r := ch.index[msg.handle]
		if r == nil || r.gone {
			return unknown(fmt.Sprintf("rule %d", msg.handle))
		}
		c.removeRule(r)
		m.last = r
	case msgNewSet:
		n, fresh := c.putSet(t, msg.set)
		if msg.full && !fresh && n.blank {
			n.blank = false
			for _, e := range msg.set.elems {
				c.putElem(n, e)
			}
		}
	case msgDelSet:
		c.dropSet(t, msg.set.name)
	case msgNewElem, msgDelElem:
		n := t.sets[msg.set.name]
		if n == nil || msg.set.handle != 0 && n.handle != msg.set.handle {
			return unknown("set " + msg.set.name)
		}
		if n.blank || n.changing() {
			return nil
		}
		for _, e := range msg.elems {
			if msg.typ == msgNewElem {
				c.putElem(n, e)
			} else {
				c.dropElem(n, e.id())
			}
		}
	}
	return nil
}

func (m *mirror) newRule(ch *chain, msg *message) error {
	c := m.c
	if old := ch.index[msg.handle]; old != nil {
		// A replaced rule keeps its place.
		if !old.gone {
			c.removeRule(old)
		}
		m.doubt = true
		c.insertRule(ch, old.pos, msg.handle, msg.raw)
		return nil
	}
	switch {
	case msg.position != 0:
		prev := ch.index[msg.position]
		if prev == nil {
			return fmt.Errorf("%w: rule %d after %d", errUnknown, msg.handle, msg.position)
		}
		m.doubt = m.doubt || !msg.bare
		c.insertRule(ch, prev.pos+1, msg.handle, msg.raw)
	case msg.append && !msg.create && m.last != nil && m.last.chain == ch:
		// It replaces the rule that was deleted just before, which was the first
		// or the last of the chain. Before Linux 5.15 it may also be appended.
		m.doubt = true
		c.insertRule(ch, m.last.pos, msg.handle, msg.raw)
	case msg.append:
		c.insertRule(ch, len(ch.rules), msg.handle, msg.raw)
	default:
		m.doubt = m.doubt || !msg.bare
		c.insertRule(ch, 0, msg.handle, msg.raw)
	}
	return nil
}
