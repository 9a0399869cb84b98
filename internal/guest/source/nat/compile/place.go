// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"slices"

	"github.com/fairlead/fairlead/internal/guest/source/nat/ruleset"
)

// ends is what the messages of one commit say of the first rule of a chain.
//
// The kernel notifies of rules one by one, in the order of the batch. A new rule is
// notified of when all rules of the batch are in the chain, but those that messages
// before have deleted. The message names the rule before the new one, or none if the
// new one is the first or the last at that moment.
type ends struct {
	gap   bool  // a rule was deleted, so that which end is meant may be open
	end   *rule // was the first or the last when it was added, and nothing was deleted since
	first *rule // is the first
}

func (m *Mirror) endsOf(ch *chain) *ends {
	e := m.ends[ch]
	if e == nil {
		e = &ends{}
		m.ends[ch] = e
	}
	return e
}

func (e *ends) deleted(r *rule) {
	e.gap, e.end = true, nil
	if e.first == r {
		e.first = nil
	}
}

// newRule inserts a rule at the place that its message gives. Where that leaves the
// order open, the place is a guess until Order is called.
func (m *Mirror) newRule(ch *chain, msg, next *ruleset.Message) {
	e := m.endsOf(ch)
	at, certain := m.place(ch, e, msg, next)
	if !certain {
		if m.open == nil {
			m.open = make(map[*chain]struct{})
		}
		m.open[ch] = struct{}{}
	}
	m.c.insertRule(ch, at, msg.Handle, msg.Raw)
	if msg.Position == 0 {
		e.end = ch.index[msg.Handle]
	}
}

// place returns the index of a new rule in its chain, and whether it is certain.
func (m *Mirror) place(ch *chain, e *ends, msg, next *ruleset.Message) (at int, certain bool) {
	if old := ch.index[msg.Handle]; old != nil { // the kernel gives no handle twice
		if !old.gone {
			m.c.removeRule(old)
		}
		return old.pos, false
	}
	last := len(ch.rules)
	if msg.Position != 0 {
		prev := ch.index[msg.Position]
		if prev == nil { // a later message is about it
			return 0, false
		}
		if prev == e.end { // more follows, so that it was not the last
			e.first = prev
		}
		return prev.pos + 1, !prev.gone && !prev.guess
	}
	switch {
	case len(ch.rules) == ch.gone:
		return last, true
	case e.first != nil:
		return last, true
	case e.gap:
		// A rule can be put next to one that is deleted before, and replaces it
		// by that. So it may be at either end, however it was added.
		return last, false
	case !msg.Append:
		return 0, true
	}
	// Before Linux 5.15 a replaced rule is notified of before the one that it
	// replaces, and looks as one that is appended.
	return last, msg.Create || next == nil || next.Type != ruleset.MsgDelRule || next.Chain != msg.Chain || next.Table != msg.Table
}

// Unordered returns the chains whose order the commits since the last dump have left
// open, sorted. Each is to be read and handed to Order.
func (m *Mirror) Unordered() []ruleset.ChainID {
	if len(m.open) == 0 {
		return nil
	}
	var out []ruleset.ChainID
	for ch := range m.open {
		if t := m.c.tables[ch.table.id]; t != ch.table || t.chains[ch.name] != ch {
			delete(m.open, ch) // it was deleted
			continue
		}
		out = append(out, ruleset.ChainID{Table: ch.table.id, Name: ch.name})
	}
	slices.SortFunc(out, ruleset.ChainID.Compare)
	return out
}

// Order puts a chain's rules into the order of read, which is what the kernel had at
// any time after the last commit that was applied: while rules exist their order does
// not change. It does nothing and returns false if read lacks some of the chain's
// rules, because a commit on its way deletes them; unless guess is set, which leaves
// each of these after the rule that is now before it. A rule that a later commit adds
// after one of them leaves the order open again.
func (m *Mirror) Order(id ruleset.ChainID, read []ruleset.Rule, guess bool) bool {
	t := m.c.tables[id.Table]
	if t == nil || t.chains[id.Name] == nil {
		return true
	}
	ch := t.chains[id.Name]
	m.c.tidy()
	at := make(map[uint64]int, len(read)) // a reading across commits may have a rule twice
	for i, s := range slices.Backward(read) {
		at[s.Handle] = i
	}
	type placed struct {
		rule  ruleset.Rule
		index int
		known bool
	}
	want := make([]placed, 0, len(ch.rules))
	complete, before := true, -1
	for _, r := range ch.rules {
		i, ok := at[r.handle]
		known := ok && sameRule(r, read[i])
		if known {
			before = i
		}
		complete = complete && known
		want = append(want, placed{ruleset.Rule{Handle: r.handle, Raw: r.raw}, before, known})
	}
	if !complete && !guess {
		return false
	}
	slices.SortStableFunc(want, func(a, b placed) int { return a.index - b.index })
	rules := make([]ruleset.Rule, len(want))
	for i, w := range want {
		rules[i] = w.rule
	}
	m.c.syncRules(ch, rules, &Differences{})
	for i, r := range ch.rules {
		r.guess = !want[i].known
	}
	delete(m.open, ch)
	return true
}
