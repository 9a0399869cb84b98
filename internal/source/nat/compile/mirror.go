// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"errors"
	"fmt"

	"github.com/fairlead/fairlead/internal/source/nat/ruleset"
)

// errUnknown means that a notification is about an object that the model does not
// have, so that the ruleset must be dumped.
var errUnknown = errors.New("a notification does not fit the model")

// ErrNotRead means that a table matters now that did not before, so that the ruleset
// must be dumped. Nothing was lost.
var ErrNotRead = errors.New("a table that was not read has a nat chain")

// Mirror applies notifications of nftables to a compiler's model.
type Mirror struct {
	c      *Compiler
	gen    uint32
	others map[ruleset.TableID]struct{} // tables that have no nat base chain
	fresh  map[ruleset.TableID]struct{} // tables that the commit being read has made
	most   highWater                    // of others
	ends   map[*chain]*ends             // chains in which the commit being read deletes or adds rules
	open   map[*chain]struct{}          // chains whose order is not known, see Unordered
}

// Ignored reports whether a table has no chain at a nat hook.
func (m *Mirror) Ignored(t ruleset.TableID) bool {
	_, ok := m.others[t]
	return ok
}

// Set returns the handles of a set and its table, and whether the elements are known.
// They are 0 if the set is not known.
func (m *Mirror) Set(t ruleset.TableID, name string) (table, handle uint64, elements bool) {
	if t := m.c.tables[t]; t != nil && t.sets[name] != nil {
		n := t.sets[name]
		return t.handle, n.Handle, !n.Blank
	}
	return 0, 0, false
}

// NewMirror returns a mirror of an empty ruleset.
func NewMirror(c *Compiler) *Mirror { return &Mirror{c: c} }

// Generation returns that of the last commit that was applied or loaded.
func (m *Mirror) Generation() uint32 { return m.gen }

func nextGen(g uint32) uint32 {
	if g++; g == 0 {
		g = 1 // the kernel skips 0 (nf_tables_commit)
	}
	return g
}

func previousGen(g uint32) uint32 {
	if g--; g == 0 {
		g = ^uint32(0)
	}
	return g
}

// Skip is called before the commit of generation gen if no commit after generation
// since and before it concerns the model. A since of 0 is before all others.
func (m *Mirror) Skip(since, gen uint32) {
	if last := previousGen(gen); int32(last-m.gen) > 0 && (since == 0 || int32(since-m.gen) <= 0) {
		m.gen = last
	}
}

// Load makes the model equal to a dump and returns what differed.
func (m *Mirror) Load(s *ruleset.Snapshot) Differences {
	m.gen = s.Generation
	m.others = make(map[ruleset.TableID]struct{}, len(s.Others))
	for _, id := range s.Others {
		m.others[id] = struct{}{}
	}
	m.fresh = make(map[ruleset.TableID]struct{})
	m.open = nil
	return m.c.Sync(s, func(id ruleset.TableID) bool { return !id.Legacy })
}

// Commit applies the messages of one commit, whose generation is gen, to the
// model. The compiler's commit is still to be called.
func (m *Mirror) Commit(msgs []*ruleset.Message, gen uint32) error {
	if int32(gen-m.gen) <= 0 {
		return nil // the dump has it
	}
	if gen != nextGen(m.gen) {
		return fmt.Errorf("%w: generation %d after %d", errUnknown, gen, m.gen)
	}
	m.ends = make(map[*chain]*ends)
	defer func() { m.ends = nil }()
	for i, msg := range msgs {
		if msg.Table.Family == 0 {
			continue
		}
		var next *ruleset.Message
		if i+1 < len(msgs) {
			next = msgs[i+1]
		}
		if err := m.apply(msg, next); err != nil {
			return err
		}
	}
	m.sortOut()
	m.gen = gen
	return nil
}

// sortOut drops the tables that the commit has made and that have no nat chain.
func (m *Mirror) sortOut() {
	if len(m.fresh) == 0 {
		return
	}
	fresh := m.fresh
	m.fresh = make(map[ruleset.TableID]struct{})
	for id := range fresh {
		t := m.c.tables[id]
		if t == nil {
			continue
		}
		nat := false
		for _, ch := range t.chains {
			nat = nat || ch.hook.IsNAT()
		}
		if !nat {
			m.c.dropTable(id)
			m.others[id] = struct{}{}
		}
	}
}

// unknown is the error of a message about something that the model does not have.
func unknown(msg *ruleset.Message, what string) error {
	return fmt.Errorf("%w: %s of table %s", errUnknown, what, msg.Table)
}

// apply applies one message, which next follows if that is not nil.
func (m *Mirror) apply(msg, next *ruleset.Message) error {
	switch msg.Type {
	case ruleset.MsgDelTable:
		m.c.dropTable(msg.Table)
		delete(m.others, msg.Table)
		if m.most.fell(len(m.others)) {
			m.others = remade(m.others)
		}
		delete(m.fresh, msg.Table)
		return nil
	case ruleset.MsgNewTable:
		m.newTable(msg)
		return nil
	}
	t := m.c.tables[msg.Table]
	switch {
	case msg.Bare && (t == nil && !m.Ignored(msg.Table) || t != nil && t.handle != msg.TableHandle):
		return ErrNotRead // a hook reports a table only from its first nat chain on
	case t != nil:
		return m.applyTo(t, msg, next)
	case !m.Ignored(msg.Table):
		return unknown(msg, "an object")
	case msg.Type == ruleset.MsgNewChain && msg.Hook.IsNAT():
		return ErrNotRead
	}
	return nil
}

func (m *Mirror) newTable(msg *ruleset.Message) {
	c := m.c
	if t := c.tables[msg.Table]; t != nil && t.handle != 0 && msg.Handle != 0 && t.handle != msg.Handle {
		c.dropTable(msg.Table) // it was removed with its owner, which is not notified
	}
	if m.Ignored(msg.Table) {
		return
	}
	if c.tables[msg.Table] == nil {
		m.fresh[msg.Table] = struct{}{}
	}
	t := c.table(msg.Table)
	t.handle, t.owned = msg.Handle, msg.Owned()
	c.seen++
	c.setDormant(t, msg.Flags&ruleset.TableDormant != 0)
}

// applyTo applies a message about an object of a table.
func (m *Mirror) applyTo(t *table, msg, next *ruleset.Message) error {
	switch msg.Type {
	case ruleset.MsgNewChain:
		hook := msg.Hook
		if old := t.chains[msg.Chain]; old != nil && hook == nil {
			hook = old.hook
		}
		if old := t.byHandle[msg.Handle]; old != nil && old.name != msg.Chain {
			return unknown(msg, "chain "+old.name+", now "+msg.Chain)
		}
		m.c.seen++
		m.c.putChain(t, msg.Chain, msg.Handle, hook)
	case ruleset.MsgDelChain, ruleset.MsgNewRule, ruleset.MsgDelRule:
		ch := t.chains[msg.Chain]
		if ch == nil {
			return unknown(msg, "chain "+msg.Chain)
		}
		return m.applyToChain(ch, msg, next)
	case ruleset.MsgNewSet:
		m.newSet(t, msg)
	case ruleset.MsgDelSet:
		m.c.dropSet(t, msg.Set.Name)
	case ruleset.MsgNewElem, ruleset.MsgDelElem:
		return m.elements(t, msg)
	}
	return nil
}

// applyToChain deletes a chain, or applies a message about one of its rules.
func (m *Mirror) applyToChain(ch *chain, msg, next *ruleset.Message) error {
	switch msg.Type {
	case ruleset.MsgDelChain:
		m.c.dropChain(ch)
		return nil
	case ruleset.MsgNewRule:
		m.newRule(ch, msg, next)
		return nil
	}
	r := ch.index[msg.Handle]
	if r == nil || r.gone {
		return unknown(msg, fmt.Sprintf("rule %d", msg.Handle))
	}
	m.c.removeRule(r)
	m.endsOf(ch).deleted(r)
	return nil
}

func (m *Mirror) newSet(t *table, msg *ruleset.Message) {
	n, fresh := m.c.putSet(t, msg.Set)
	if !msg.Full || fresh || !n.Blank {
		return
	}
	n.Blank = false
	for _, e := range msg.Set.Elements {
		m.c.putElem(n, e)
	}
}

// elements adds or deletes elements of a set.
func (m *Mirror) elements(t *table, msg *ruleset.Message) error {
	n := t.sets[msg.Set.Name]
	if n == nil || msg.Set.Handle != 0 && n.Handle != msg.Set.Handle {
		return unknown(msg, "set "+msg.Set.Name)
	}
	if n.Blank || n.Changing() {
		return nil
	}
	for _, e := range msg.Elements {
		if msg.Type == ruleset.MsgNewElem {
			m.c.putElem(n, e)
		} else {
			m.c.dropElem(n, e.ID())
		}
	}
	return nil
}
