// SPDX-License-Identifier: Apache-2.0

package nat

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"

	"github.com/fairlead/fairlead/internal/source/nat/hook"
)

// hookable implements system: nf_tables is loaded. Where it is built in that
// never changes, and is not seen here.
func (k *kernel) hookable() bool {
	state, err := os.ReadFile("/sys/module/nf_tables/initstate")
	return err == nil && string(bytes.TrimSpace(state)) == "live"
}

func (k *kernel) watchHooks(method string) (stream, error) {
	c, err := hook.OpenCommits(k.path, method, k.types)
	if err != nil {
		return nil, err
	}
	return &hookStream{c}, nil
}

// hookStream says what hooks tell as the messages that nfnetlink would send.
type hookStream struct{ commits *hook.Commits }

func (s *hookStream) Close() error { return s.commits.Close() }

func (s *hookStream) next() ([]*message, error) {
	events, err := s.commits.Next()
	if errors.Is(err, hook.ErrCommitsLost) {
		return nil, errors.Join(errLost, err)
	}
	if err != nil {
		return nil, err
	}
	out := make([]*message, 0, len(events))
	for i := range events {
		if events[i].Kind == hook.CommitMany {
			return nil, errMany
		}
		out = append(out, hookMessage(&events[i]))
	}
	return out, nil
}

// hookMessage returns what a hook told as a message. Its table's family is 0 if
// it does not concern the nat ruleset.
func hookMessage(e *hook.CommitEvent) *message {
	if e.Kind == hook.CommitEnd {
		return &message{typ: msgNewGen, gen: e.Generation}
	}
	m := &message{bare: true}
	if e.Family == famInet || e.Family == famIP || e.Family == famIP6 {
		m.table = tableID{family: e.Family, name: e.Table}
	}
	either := func(add, del uint8) uint8 {
		if e.Deleted {
			return del
		}
		return add
	}
	switch e.Kind {
	case hook.CommitTable:
		m.typ = either(msgNewTable, msgDelTable)
	case hook.CommitChain:
		m.typ, m.chain = either(msgNewChain, msgDelChain), e.Name
	case hook.CommitRule:
		m.typ, m.chain = either(msgNewRule, msgDelRule), e.Name
		m.handle, m.position = e.Handle, e.Previous
	case hook.CommitElement:
		m.typ, m.set = either(msgNewElem, msgDelElem), &nset{name: e.Name, handle: e.Handle}
		el := element{key: e.Key, end: e.End, data: e.Value, flags: e.Flags}
		if e.IsVerdict {
			el.verdict = &verdict{code: e.Verdict, chain: e.Chain}
		}
		m.elems = []element{el}
	}
	return m
}

// resolver completes messages that hooks told in bare form.
type resolver struct {
	k     *kernel
	known model
	out   []*message
	sets  map[setID]uint64 // sets that are known by now, with all their elements
	blank map[setID]uint64 // those without
}

type setID struct {
	table tableID
	name  string
}

// resolve implements system. It asks for each object that is new, and returns
// errMoved if one is gone again. What a later message deletes is not asked for.
func (k *kernel) resolve(msgs []*message, known model) ([]*message, error) {
	r := resolver{k: k, known: known, sets: make(map[setID]uint64), blank: make(map[setID]uint64)}
	skip := doomed(msgs)
	for i, m := range msgs {
		if !m.bare || m.table.family == 0 || skip[i] {
			r.out = append(r.out, m)
			continue
		}
		if err := r.add(m); err != nil {
			return nil, err
		}
	}
	return r.out, nil
}

// doomed tells of each message whether a later one deletes what it makes.
func doomed(msgs []*message) []bool {
	out := make([]bool, len(msgs))
	tables := make(map[tableID]bool)
	chains := make(map[chainID]bool)
	type ruleID struct {
		chain  chainID
		handle uint64
	}
	rules := make(map[ruleID]bool)
	for i := len(msgs) - 1; i >= 0; i-- {
		m := msgs[i]
		chain := chainID{m.table, m.chain}
		rule := ruleID{chain, m.handle}
		switch m.typ {
		case msgDelTable:
			tables[m.table] = true
		case msgDelChain:
			chains[chain] = true
		case msgDelRule:
			rules[rule] = true
		case msgNewTable:
			out[i] = tables[m.table]
		case msgNewChain:
			out[i] = tables[m.table] || chains[chain]
		case msgNewRule:
			out[i] = tables[m.table] || chains[chain] || rules[rule]
		case msgNewElem, msgDelElem:
			out[i] = tables[m.table]
		}
	}
	return out
}

func (r *resolver) add(m *message) error {
	name := append([]byte(m.table.name), 0)
	switch m.typ {
	case msgNewTable:
		got, err := r.ask(msgGetTable, m, appendAttr(nil, 1, name))
		if err != nil {
			return err
		}
		m.flags, m.handle = got.flags, got.handle
	case msgNewChain:
		got, err := r.ask(msgGetChain, m, appendAttr(appendAttr(nil, 1, name), 3, append([]byte(m.chain), 0)))
		if err != nil {
			return err
		}
		m.hook = got.hook
	case msgNewRule:
		if r.known.ignored(m.table) {
			break
		}
		attrs := appendAttr(appendAttr(nil, 1, name), 2, append([]byte(m.chain), 0))
		got, err := r.ask(msgGetRule, m, appendAttr(attrs, 3, binary.BigEndian.AppendUint64(nil, m.handle)))
		if err != nil {
			return err
		}
		m.raw = got.raw
		if err := r.lookups(m); err != nil {
			return err
		}
	case msgNewElem, msgDelElem:
		if r.known.ignored(m.table) {
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
func (r *resolver) ask(typ uint8, m *message, attrs []byte) (got *message, err error) {
	err = r.k.request(typ, m.table.family, false, attrs, func(a *message) error {
		got = a
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("ask for an object of table %s: %w", m.table, err)
	}
	if got == nil {
		return nil, errMoved
	}
	return got, nil
}

// lookups sees that the sets that a new rule reads are known.
func (r *resolver) lookups(m *message) error {
	exprs, err := parseExprs(m.raw)
	if err != nil {
		return nil //nolint:nilerr // the compiler will say so
	}
	for _, x := range exprs {
		e, ok := x.(exprLookup)
		if !ok {
			continue
		}
		n, err := r.getSet(m, e.set)
		if err != nil {
			return err
		}
		id := setID{m.table, e.set}
		if h, ok := r.sets[id]; ok && h == n.handle {
			continue
		}
		if h, elements, ok := r.known.set(m.table, e.set); ok && elements && h == n.handle {
			if _, again := r.blank[id]; !again {
				continue
			}
		}
		if err := r.k.dumpSet(m.table, n); err != nil {
			return err
		}
		r.sets[id] = n.handle
		r.out = append(r.out, &message{typ: msgNewSet, table: m.table, set: n, full: true})
	}
	return nil
}

// elements sees that the set of an element is known, and reports whether it is
// still there. Of a new one that no rule reads only that much is known.
func (r *resolver) elements(m *message) (there bool, err error) {
	id := setID{m.table, m.set.name}
	if h, ok := r.sets[id]; ok && h == m.set.handle {
		return true, nil
	}
	if h, ok := r.blank[id]; ok && h == m.set.handle {
		return true, nil
	}
	if h, _, ok := r.known.set(m.table, m.set.name); ok && h == m.set.handle {
		return true, nil
	}
	n, err := r.getSet(m, m.set.name)
	if err != nil || n.handle != m.set.handle {
		return false, err // another set of that name is there now
	}
	n.blank = true
	r.blank[id] = n.handle
	r.out = append(r.out, &message{typ: msgNewSet, table: m.table, set: n})
	return true, nil
}

func (r *resolver) getSet(m *message, name string) (*nset, error) {
	attrs := appendAttr(appendAttr(nil, 1, append([]byte(m.table.name), 0)), 2, append([]byte(name), 0))
	got, err := r.ask(msgGetSet, m, attrs)
	if err != nil {
		return nil, err
	}
	if got.set == nil {
		return nil, errMoved
	}
	return got.set, nil
}
