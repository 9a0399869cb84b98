// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"errors"
	"fmt"

	"github.com/fairlead/fairlead/internal/guest/source/nat/ruleset"
	"github.com/fairlead/fairlead/internal/port/compact"
)

// errUnknown means that a notification is about an object that the model does not
// have, so that the ruleset must be dumped.
var errUnknown = errors.New("a notification does not fit the model")

// ErrNotRead means that a table matters now that did not before, so that the ruleset
// must be dumped. Nothing was lost.
var ErrNotRead = errors.New("a table that was not read has a nat chain")

// Mirror applies notifications of nftables to a compiler's model.
type Mirror struct {
	// Filtered is set if the notifications lack what concerns neither tables, nor chains,
	// nor the tables of the last dump that have a nat base chain.
	Filtered bool

	c        *Compiler
	gen      uint32
	followed map[ruleset.TableID]struct{} // tables of the last dump that have a nat base chain
	others   map[ruleset.TableID]struct{} // tables that have no nat base chain
	changed  map[ruleset.TableID]struct{} // tables that the commit being read has made, or of which it has deleted a chain
	most     compact.Peak                 // of others
	ends     map[*chain]*ends             // chains in which the commit being read deletes or adds rules
	open     map[*chain]struct{}          // chains whose order is not known, see Unordered
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

// Load makes the model equal to a dump and returns what differed.
func (m *Mirror) Load(s *ruleset.Snapshot) Differences {
	m.gen = s.Generation
	m.others = make(map[ruleset.TableID]struct{}, len(s.Others))
	for _, id := range s.Others {
		m.others[id] = struct{}{}
	}
	m.followed = make(map[ruleset.TableID]struct{}, len(s.Tables))
	for _, t := range s.Tables {
		m.followed[t.ID] = struct{}{}
	}
	m.changed = make(map[ruleset.TableID]struct{})
	m.open = nil
	return m.c.Sync(s, func(id ruleset.TableID) bool { return !id.Legacy })
}

// Commit applies the messages of one commit, whose generation is gen, to the
// model. The compiler's commit is still to be called.
func (m *Mirror) Commit(msgs []*ruleset.Message, gen uint32) error {
	if int32(gen-m.gen) <= 0 {
		return nil // the dump has it
	}
	if gen != nextGen(m.gen) && !m.Filtered {
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
	if err := m.sortOut(); err != nil {
		return err
	}
	m.gen = gen
	return nil
}

// complete reports whether all notifications about a table are received.
func (m *Mirror) complete(id ruleset.TableID) bool {
	_, followed := m.followed[id]
	return followed || !m.Filtered
}

// sortOut drops the tables that have no nat chain after the commit.
func (m *Mirror) sortOut() error {
	if len(m.changed) == 0 {
		return nil
	}
	changed := m.changed
	m.changed = make(map[ruleset.TableID]struct{})
	for id := range changed {
		t := m.c.tables[id]
		if t == nil {
			continue
		}
		nat := false
		for _, ch := range t.chains {
			nat = nat || ch.hook.IsNAT()
		}
		switch {
		case !nat:
			m.c.dropTable(id)
			m.others[id] = struct{}{}
		case !m.complete(id):
			return ErrNotRead
		}
	}
	return nil
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
		if m.most.Passed(len(m.others)) {
			m.others = compact.Map(m.others)
		}
		delete(m.changed, msg.Table)
		return nil
	case ruleset.MsgNewTable:
		m.newTable(msg)
		return nil
	}
	t := m.c.tables[msg.Table]
	_, ignored := m.others[msg.Table]
	ofChain := msg.Type == ruleset.MsgNewChain || msg.Type == ruleset.MsgDelChain
	switch {
	case t != nil && (ofChain || m.complete(t.id)):
		return m.applyTo(t, msg, next)
	case t == nil && !ignored:
		return unknown(msg, "an object")
	case t == nil && msg.Type == ruleset.MsgNewChain && msg.Hook.IsNAT():
		return ErrNotRead
	}
	return nil
}

func (m *Mirror) newTable(msg *ruleset.Message) {
	c := m.c
	if t := c.tables[msg.Table]; t != nil && t.handle != 0 && msg.Handle != 0 && t.handle != msg.Handle {
		c.dropTable(msg.Table) // it was removed with its owner, which is not notified
	}
	if _, ignored := m.others[msg.Table]; ignored {
		return
	}
	if c.tables[msg.Table] == nil {
		m.changed[msg.Table] = struct{}{}
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
		m.c.putSet(t, msg.Set)
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
		m.changed[ch.table.id] = struct{}{}
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

// elements adds or deletes elements of a set.
func (m *Mirror) elements(t *table, msg *ruleset.Message) error {
	n := t.sets[msg.Set.Name]
	if n == nil {
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
