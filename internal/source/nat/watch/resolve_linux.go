// SPDX-License-Identifier: Apache-2.0

package watch

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/source/nat/ruleset"
)

// resolver completes the bare messages of hooks.
type resolver struct {
	k     *Kernel
	known Known
	msgs  []*ruleset.Message
	made  map[ruleset.TableID]bool // tables that the messages make or delete
	rules map[*ruleset.Message][]string
	sets  map[setID]*ruleset.Set // as the kernel has them now
	full  map[setID]uint64       // handles of those that were sent with their elements
}

type setID struct {
	table ruleset.TableID
	name  string
}

// Resolve implements system. It asks for all objects that are new at once, and
// returns ErrMoved if one is gone again. What a later message deletes is not asked
// for. Messages that are not bare are left as they are.
func (k *Kernel) Resolve(msgs []*ruleset.Message, known Known) ([]*ruleset.Message, error) {
	if !slices.ContainsFunc(msgs, func(m *ruleset.Message) bool { return m.Bare }) {
		return msgs, nil
	}
	r := resolver{
		k: k, known: known, msgs: msgs, made: make(map[ruleset.TableID]bool), rules: make(map[*ruleset.Message][]string),
		sets: make(map[setID]*ruleset.Set), full: make(map[setID]uint64),
	}
	if err := r.objects(); err != nil {
		return nil, err
	}
	if err := r.lookups(); err != nil {
		return nil, err
	}
	return r.assemble()
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

// ignored reports whether the message is about a table that had no nat chain before
// the messages and was not made by them.
func (r *resolver) ignored(m *ruleset.Message) bool {
	return !r.made[m.Table] && r.known.Ignored(m.Table)
}

// objects asks for the new tables, chains and rules.
func (r *resolver) objects() error {
	for _, m := range r.msgs {
		if m.Type == ruleset.MsgNewTable || m.Type == ruleset.MsgDelTable {
			r.made[m.Table] = true
		}
	}
	var asked []*ruleset.Message
	var requests []request
	skip := doomed(r.msgs)
	for i, m := range r.msgs {
		// A new chain may be the table's first at a nat hook, so that it matters now.
		if !m.Bare || skip[i] || r.ignored(m) && m.Type != ruleset.MsgNewChain {
			continue
		}
		if q, ok := requestFor(m); ok {
			asked, requests = append(asked, m), append(requests, q)
		}
	}
	answers, err := r.k.ask(requests)
	if err != nil {
		return fmt.Errorf("ask for what a commit made: %w", err)
	}
	for i, m := range asked {
		if err := r.complete(m, answers[i]); err != nil {
			return err
		}
	}
	return nil
}

// requestFor returns the request for the object that a message is about, if it is
// one that the hooks do not report in full.
func requestFor(m *ruleset.Message) (q request, ok bool) {
	attrs := ruleset.AppendAttr(nil, 1, append([]byte(m.Table.Name), 0))
	chain := append([]byte(m.Chain), 0)
	switch m.Type {
	case ruleset.MsgNewTable:
		return request{ruleset.MsgGetTable, m.Table.Family, attrs}, true
	case ruleset.MsgNewChain:
		return request{ruleset.MsgGetChain, m.Table.Family, ruleset.AppendAttr(attrs, 3, chain)}, true
	case ruleset.MsgNewRule:
		attrs = ruleset.AppendAttr(attrs, 2, chain)
		return request{ruleset.MsgGetRule, m.Table.Family, ruleset.AppendAttr(attrs, 3, binary.BigEndian.AppendUint64(nil, m.Handle))}, true
	}
	return request{}, false
}

// complete copies what the kernel answered into a message.
func (r *resolver) complete(m, answer *ruleset.Message) error {
	if answer.Handle != m.Handle {
		return ErrMoved // another object has the name now
	}
	switch m.Type {
	case ruleset.MsgNewTable:
		m.Flags = answer.Flags
	case ruleset.MsgNewChain:
		m.Hook = answer.Hook
	case ruleset.MsgNewRule:
		m.Raw = answer.Raw
		exprs, err := ruleset.ParseExprs(m.Raw)
		if err != nil {
			return nil //nolint:nilerr // the compiler reports it
		}
		for _, x := range exprs {
			if e, ok := x.(ruleset.Lookup); ok {
				r.rules[m] = append(r.rules[m], e.Set)
				r.sets[setID{m.Table, e.Set}] = nil
			}
		}
	}
	return nil
}

// lookups asks for the sets that new rules read, at first without their elements.
func (r *resolver) lookups() error {
	var ids []setID
	var requests []request
	for id := range r.sets {
		attrs := ruleset.AppendAttr(nil, 1, append([]byte(id.table.Name), 0))
		ids = append(ids, id)
		requests = append(requests, request{ruleset.MsgGetSet, id.table.Family, ruleset.AppendAttr(attrs, 2, append([]byte(id.name), 0))})
	}
	answers, err := r.k.ask(requests)
	if err != nil {
		return fmt.Errorf("ask for sets: %w", err)
	}
	for i, id := range ids {
		if answers[i].Set == nil {
			return ErrMoved
		}
		r.sets[id] = answers[i].Set
	}
	return nil
}

// assemble returns the messages, each rule after the sets that it reads and that the
// model does not know. Elements of sets that nothing reads are left out.
func (r *resolver) assemble() ([]*ruleset.Message, error) {
	var out []*ruleset.Message
	for _, m := range r.msgs {
		for _, name := range r.rules[m] {
			id := setID{m.Table, name}
			n := r.sets[id]
			if _, sent := r.full[id]; sent || r.has(m, n) {
				continue
			}
			if err := r.k.steadySet(m.Table, n); err != nil {
				return nil, err
			}
			r.full[id] = n.Handle
			out = append(out, &ruleset.Message{Type: ruleset.MsgNewSet, Table: m.Table, Set: n, Full: true})
		}
		if m.Bare && (m.Type == ruleset.MsgNewElem || m.Type == ruleset.MsgDelElem) && !r.reads(m) {
			continue
		}
		out = append(out, m)
	}
	return out, nil
}

// has reports whether the model has the set n, which a rule of message m reads, with
// its elements. Handles of sets begin anew in each table.
func (r *resolver) has(m *ruleset.Message, n *ruleset.Set) bool {
	table, h, elements := r.known.Set(m.Table, n.Name)
	return elements && h == n.Handle && table == m.TableHandle
}

// reads reports whether the set of an element is in the model, or will be when the
// messages so far have been applied.
func (r *resolver) reads(m *ruleset.Message) bool {
	if h, ok := r.full[setID{m.Table, m.Set.Name}]; ok && h == m.Set.Handle {
		return true
	}
	table, h, _ := r.known.Set(m.Table, m.Set.Name)
	return h == m.Set.Handle && table == m.TableHandle
}

// steadyAttempts is how often a set is read at most, while commits change the ruleset.
const steadyAttempts = 20

// steadySet reads the elements of a set while there is no commit. Reading across a
// commit can see elements of a later batch that is then refused, which nothing
// would take back.
func (k *Kernel) steadySet(t ruleset.TableID, n *ruleset.Set) error {
	err := ErrMoved
	for try := 0; try < steadyAttempts && errors.Is(err, ErrMoved); try++ {
		var gen uint32
		if gen, err = k.Generation(); err != nil {
			return err
		}
		clear(n.Elements)
		if err = k.settled(gen); err == nil {
			err = k.dumpSet(t, n)
		}
		if err != nil {
			continue
		}
		if now, err := k.Generation(); err != nil || now == gen {
			return err
		}
		err = ErrMoved
	}
	return err
}

// request is a question for one object.
type request struct {
	typ    uint8
	family uint8
	attrs  []byte
}

// askAtOnce is how many requests are sent at once: their answers fit the default
// receive buffer of a socket.
const askAtOnce = 32

// ask sends requests and returns the answers, in order. It returns ErrMoved if one of
// the objects does not exist.
func (k *Kernel) ask(requests []request) ([]*ruleset.Message, error) {
	out := make([]*ruleset.Message, 0, len(requests))
	for some := range slices.Chunk(requests, askAtOnce) {
		if err := k.askSome(some, &out); err != nil {
			k.closeRequests() // answers may still be on their way
			if errors.Is(err, unix.ENOENT) {
				return nil, ErrMoved
			}
			return nil, err
		}
	}
	return out, nil
}

func (k *Kernel) askSome(requests []request, out *[]*ruleset.Message) error {
	if err := k.openRequests(); err != nil {
		return err
	}
	msgs := make([]netlink.Message, 0, len(requests))
	for _, q := range requests {
		msgs = append(msgs, requestMessage(q.typ, q.family, 0, q.attrs))
	}
	if _, err := k.nft.SendMessages(msgs); err != nil {
		return err
	}
	for want := len(*out) + len(requests); len(*out) < want; {
		for m, err := range k.nft.ReceiveIter() {
			if err != nil {
				return err
			}
			msg, err := ruleset.ParseMessage(uint8(m.Header.Type), uint16(m.Header.Flags), m.Data)
			if err != nil {
				return err
			}
			*out = append(*out, msg)
		}
	}
	return nil
}
