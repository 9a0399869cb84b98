// SPDX-License-Identifier: Apache-2.0

package watch

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"

	"github.com/fairlead/fairlead/internal/source/nat/hook"
	"github.com/fairlead/fairlead/internal/source/nat/ruleset"
)

// Hookable implements system: nf_tables is loaded. Where it is built in that
// never changes, and is not seen here.
func (k *Kernel) Hookable() bool {
	state, err := os.ReadFile("/sys/module/nf_tables/initstate")
	return err == nil && string(bytes.TrimSpace(state)) == "live"
}

func (k *Kernel) watchHooks(method string) (Stream, error) {
	c, err := hook.OpenCommits(k.path, method, k.types)
	if err != nil {
		return nil, err
	}
	return &hookStream{c}, nil
}

// hookStream turns what hooks report into the messages that nfnetlink would send.
type hookStream struct{ commits *hook.Commits }

func (s *hookStream) Close() error { return s.commits.Close() }

func (s *hookStream) Next() ([]*ruleset.Message, error) {
	events, err := s.commits.Next()
	if errors.Is(err, hook.ErrCommitsLost) {
		return nil, errors.Join(ErrLost, err)
	}
	if err != nil {
		return nil, err
	}
	out := make([]*ruleset.Message, 0, len(events))
	for i := range events {
		if events[i].Kind == hook.CommitMany {
			return nil, ErrMany
		}
		out = append(out, hookMessage(&events[i]))
	}
	return out, nil
}

// hookMessage returns what a hook reported as a message. Its table's family is 0 if
// it does not concern the nat ruleset.
func hookMessage(e *hook.CommitEvent) *ruleset.Message {
	if e.Kind == hook.CommitEnd {
		return &ruleset.Message{Type: ruleset.MsgNewGen, Generation: e.Generation}
	}
	m := &ruleset.Message{Bare: true}
	if e.Family == ruleset.FamilyInet || e.Family == ruleset.FamilyIP || e.Family == ruleset.FamilyIP6 {
		m.Table = ruleset.TableID{Family: e.Family, Name: e.Table}
	}
	either := func(add, del uint8) uint8 {
		if e.Deleted {
			return del
		}
		return add
	}
	switch e.Kind {
	case hook.CommitTable:
		m.Type = either(ruleset.MsgNewTable, ruleset.MsgDelTable)
	case hook.CommitChain:
		m.Type, m.Chain = either(ruleset.MsgNewChain, ruleset.MsgDelChain), e.Name
	case hook.CommitRule:
		m.Type, m.Chain = either(ruleset.MsgNewRule, ruleset.MsgDelRule), e.Name
		m.Handle, m.Position = e.Handle, e.Previous
	case hook.CommitElement:
		m.Type, m.Set = either(ruleset.MsgNewElem, ruleset.MsgDelElem), &ruleset.Set{Name: e.Name, Handle: e.Handle}
		el := ruleset.Element{Key: e.Key, End: e.End, Data: e.Value, Flags: e.Flags}
		if e.IsVerdict {
			el.Verdict = &ruleset.Verdict{Code: e.Verdict, Chain: e.Chain}
		}
		m.Elements = []ruleset.Element{el}
	}
	return m
}

// resolver completes the bare messages of hooks.
type resolver struct {
	k     *Kernel
	known Known
	out   []*ruleset.Message
	sets  map[setID]uint64 // sets that are known by now, with all their elements
	blank map[setID]uint64 // those without
}

type setID struct {
	table ruleset.TableID
	name  string
}

// Resolve implements system. It asks for each object that is new, and returns
// errMoved if one is gone again. What a later message deletes is not asked for.
func (k *Kernel) Resolve(msgs []*ruleset.Message, known Known) ([]*ruleset.Message, error) {
	r := resolver{k: k, known: known, sets: make(map[setID]uint64), blank: make(map[setID]uint64)}
	skip := doomed(msgs)
	for i, m := range msgs {
		if !m.Bare || m.Table.Family == 0 || skip[i] {
			r.out = append(r.out, m)
			continue
		}
		if err := r.add(m); err != nil {
			return nil, err
		}
	}
	return r.out, nil
}

// doomed returns for each message whether a later one deletes what it makes.
func doomed(msgs []*ruleset.Message) []bool {
	out := make([]bool, len(msgs))
	tables := make(map[ruleset.TableID]bool)
	chains := make(map[ruleset.ChainID]bool)
	type ruleID struct {
		chain  ruleset.ChainID
		handle uint64
	}
	rules := make(map[ruleID]bool)
	for i := len(msgs) - 1; i >= 0; i-- {
		m := msgs[i]
		chain := ruleset.ChainID{Table: m.Table, Name: m.Chain}
		rule := ruleID{chain, m.Handle}
		switch m.Type {
		case ruleset.MsgDelTable:
			tables[m.Table] = true
		case ruleset.MsgDelChain:
			chains[chain] = true
		case ruleset.MsgDelRule:
			rules[rule] = true
		case ruleset.MsgNewTable:
			out[i] = tables[m.Table]
		case ruleset.MsgNewChain:
			out[i] = tables[m.Table] || chains[chain]
		case ruleset.MsgNewRule:
			out[i] = tables[m.Table] || chains[chain] || rules[rule]
		case ruleset.MsgNewElem, ruleset.MsgDelElem:
			out[i] = tables[m.Table]
		}
	}
	return out
}

func (r *resolver) add(m *ruleset.Message) error {
	name := append([]byte(m.Table.Name), 0)
	switch m.Type {
	case ruleset.MsgNewTable:
		got, err := r.ask(ruleset.MsgGetTable, m, ruleset.AppendAttr(nil, 1, name))
		if err != nil {
			return err
		}
		m.Flags, m.Handle = got.Flags, got.Handle
	case ruleset.MsgNewChain:
		got, err := r.ask(ruleset.MsgGetChain, m, ruleset.AppendAttr(ruleset.AppendAttr(nil, 1, name), 3, append([]byte(m.Chain), 0)))
		if err != nil {
			return err
		}
		m.Hook, m.Handle = got.Hook, got.Handle
	case ruleset.MsgNewRule:
		if r.known.Ignored(m.Table) {
			break
		}
		attrs := ruleset.AppendAttr(ruleset.AppendAttr(nil, 1, name), 2, append([]byte(m.Chain), 0))
		got, err := r.ask(ruleset.MsgGetRule, m, ruleset.AppendAttr(attrs, 3, binary.BigEndian.AppendUint64(nil, m.Handle)))
		if err != nil {
			return err
		}
		m.Raw = got.Raw
		if err := r.lookups(m); err != nil {
			return err
		}
	case ruleset.MsgNewElem, ruleset.MsgDelElem:
		if r.known.Ignored(m.Table) {
			break
		}
		if there, err := r.elements(m); err != nil || !there {
			return err
		}
	}
	r.out = append(r.out, m)
	return nil
}

// ask sends one request and returns the answer.
func (r *resolver) ask(typ uint8, m *ruleset.Message, attrs []byte) (got *ruleset.Message, err error) {
	err = r.k.request(typ, m.Table.Family, false, attrs, func(a *ruleset.Message) error {
		got = a
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("ask for an object of table %s: %w", m.Table, err)
	}
	if got == nil {
		return nil, ErrMoved
	}
	return got, nil
}

// lookups reads the sets that a new rule reads, unless they are known.
func (r *resolver) lookups(m *ruleset.Message) error {
	exprs, err := ruleset.ParseExprs(m.Raw)
	if err != nil {
		return nil //nolint:nilerr // the compiler reports it
	}
	for _, x := range exprs {
		e, ok := x.(ruleset.Lookup)
		if !ok {
			continue
		}
		n, err := r.getSet(m, e.Set)
		if err != nil {
			return err
		}
		id := setID{m.Table, e.Set}
		if h, ok := r.sets[id]; ok && h == n.Handle {
			continue
		}
		if h, elements, ok := r.known.Set(m.Table, e.Set); ok && elements && h == n.Handle {
			if _, again := r.blank[id]; !again {
				continue
			}
		}
		if err := r.k.dumpSet(m.Table, n); err != nil {
			return err
		}
		r.sets[id] = n.Handle
		r.out = append(r.out, &ruleset.Message{Type: ruleset.MsgNewSet, Table: m.Table, Set: n, Full: true})
	}
	return nil
}

// elements reads the set of an element unless it is known, without its elements,
// and reports whether the set still exists.
func (r *resolver) elements(m *ruleset.Message) (there bool, err error) {
	id := setID{m.Table, m.Set.Name}
	if h, ok := r.sets[id]; ok && h == m.Set.Handle {
		return true, nil
	}
	if h, ok := r.blank[id]; ok && h == m.Set.Handle {
		return true, nil
	}
	if h, _, ok := r.known.Set(m.Table, m.Set.Name); ok && h == m.Set.Handle {
		return true, nil
	}
	n, err := r.getSet(m, m.Set.Name)
	if err != nil || n.Handle != m.Set.Handle {
		return false, err // another set of that name is there now
	}
	n.Blank = true
	r.blank[id] = n.Handle
	r.out = append(r.out, &ruleset.Message{Type: ruleset.MsgNewSet, Table: m.Table, Set: n})
	return true, nil
}

func (r *resolver) getSet(m *ruleset.Message, name string) (*ruleset.Set, error) {
	attrs := ruleset.AppendAttr(ruleset.AppendAttr(nil, 1, append([]byte(m.Table.Name), 0)), 2, append([]byte(name), 0))
	got, err := r.ask(ruleset.MsgGetSet, m, attrs)
	if err != nil {
		return nil, err
	}
	if got.Set == nil {
		return nil, ErrMoved
	}
	return got.Set, nil
}
