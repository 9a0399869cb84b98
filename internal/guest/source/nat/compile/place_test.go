// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"encoding/binary"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/fairlead/fairlead/internal/guest/source/nat/ruleset"
	"github.com/fairlead/fairlead/internal/testkit/natrules"
)

// kernelChain is a chain as the kernel changes and notifies it.
type kernelChain struct {
	old     bool // as before Linux 5.15
	handle  uint64
	rules   []*kernelRule
	changes []func()          // what the commit does for each change of the batch, in its order
	made    []ruleset.Message // the notifications of the last commit
}

type kernelRule struct {
	handle uint64
	dead   bool // deleted by the batch
}

func (k *kernelChain) notify(f func() ruleset.Message) {
	k.changes = append(k.changes, func() {
		m := f()
		m.Table, m.Chain = natrules.Table, "pre"
		k.made = append(k.made, m)
	})
}

// put adds a rule to the chain at index at.
func (k *kernelChain) put(at int, flags ruleset.Message) {
	k.handle++
	r := &kernelRule{handle: k.handle}
	k.rules = slices.Insert(k.rules, at, r)
	k.notify(func() ruleset.Message {
		m := flags
		m.Type, m.Handle, m.Raw = ruleset.MsgNewRule, r.handle, kernelRaw(r.handle)
		if i := slices.Index(k.rules, r); i > 0 && i < len(k.rules)-1 {
			m.Position = k.rules[i-1].handle
		}
		return m
	})
}

func kernelRaw(handle uint64) []byte { return binary.BigEndian.AppendUint64(nil, handle) }

func (k *kernelChain) flags(replaces, appends bool) ruleset.Message {
	return ruleset.Message{Append: appends || replaces, Create: !replaces && !k.old}
}

func (k *kernelChain) add()    { k.put(len(k.rules), k.flags(false, true)) }
func (k *kernelChain) insert() { k.put(0, k.flags(false, false)) }

// beside puts a rule next to the rule at index at, which the batch may have deleted.
func (k *kernelChain) beside(at int, after bool) {
	flags := k.flags(false, after)
	if after {
		at++
	}
	k.put(at, flags)
}

func (k *kernelChain) remove(r *kernelRule) {
	if r.dead {
		return
	}
	r.dead = true
	k.notify(func() ruleset.Message {
		k.rules = slices.DeleteFunc(k.rules, func(x *kernelRule) bool { return x == r })
		return ruleset.Message{Type: ruleset.MsgDelRule, Handle: r.handle}
	})
}

func (k *kernelChain) replace(r *kernelRule) {
	if r.dead {
		return
	}
	at := slices.Index(k.rules, r)
	if k.old {
		k.put(at, k.flags(true, false))
		k.remove(r)
		return
	}
	k.remove(r)
	k.put(at, k.flags(true, false))
}

// commit ends the batch and returns its notifications.
func (k *kernelChain) commit() (out []*ruleset.Message) {
	for _, f := range k.changes {
		f()
	}
	for _, m := range k.made {
		out = append(out, &m)
	}
	k.changes, k.made = nil, nil
	return out
}

func (k *kernelChain) random(r *rand.Rand) {
	if len(k.rules) > 12 {
		k.flush()
	}
	pick := func() int { return r.IntN(len(k.rules)) }
	switch op := r.IntN(8); {
	case op == 0 || len(k.rules) == 0:
		k.add()
	case op == 1:
		k.insert()
	case op < 4:
		k.beside(pick(), r.IntN(2) == 0)
	case op < 6:
		k.remove(k.rules[pick()])
	case op == 6:
		k.replace(k.rules[pick()])
	case r.IntN(4) == 0:
		k.flush()
	}
}

func (k *kernelChain) flush() {
	for _, r := range slices.Clone(k.rules) {
		k.remove(r)
	}
}

func (k *kernelChain) read() []ruleset.Rule {
	out := []ruleset.Rule{}
	for _, r := range k.rules {
		out = append(out, ruleset.Rule{Handle: r.handle, Raw: kernelRaw(r.handle)})
	}
	return out
}

func handles(rs []ruleset.Rule) (out []uint64) {
	for _, r := range rs {
		out = append(out, r.Handle)
	}
	return out
}

func (m *Mirror) handles() (out []uint64) {
	m.c.tidy()
	for _, r := range m.c.tables[natrules.Table].chains["pre"].rules {
		out = append(out, r.handle)
	}
	return out
}

func newMirrorOf(k *kernelChain) (*Mirror, ruleset.ChainID) {
	m := NewMirror(compiled(&ruleset.Snapshot{}))
	t := &ruleset.Table{ID: natrules.Table, Chains: natrules.BaseChains()}
	t.Chains[0].Rules = k.read()
	m.Load(&ruleset.Snapshot{Generation: 1, Tables: []*ruleset.Table{t}})
	return m, ruleset.ChainID{Table: natrules.Table, Name: t.Chains[0].Name}
}

// After random batches the order of rules is the kernel's or is known to be open, and
// a reading at any later time settles it.
func TestOrderIsNeverWrong(t *testing.T) {
	const commits = 60_000
	for _, old := range []bool{false, true} {
		seed := rand.Uint64()
		r := rand.New(rand.NewPCG(seed, 1))
		k := &kernelChain{old: old}
		m, id := newMirrorOf(k)
		type commit struct {
			msgs  []*ruleset.Message
			after []uint64
		}
		var queue []commit
		made, compared, read := 0, 0, 0
		for made < commits || len(queue) > 0 {
			if made < commits && (len(queue) == 0 || r.IntN(3) == 0 && len(queue) < 5) {
				for range 1 + r.IntN(5) {
					k.random(r)
				}
				queue = append(queue, commit{k.commit(), handles(k.read())})
				made++
				continue
			}
			if err := m.Commit(queue[0].msgs, m.Generation()+1); err != nil {
				t.Fatalf("seed %d: %v", seed, err)
			}
			if len(m.Unordered()) > 0 {
				read++
				m.Order(id, k.read(), false)
			}
			if len(m.Unordered()) == 0 {
				compared++
				if got := m.handles(); !slices.Equal(got, queue[0].after) {
					t.Fatalf("seed %d, old %v, commit %d: rules %v, want %v", seed, old, m.Generation(), got, queue[0].after)
				}
			}
			queue = queue[1:]
		}
		if len(m.Unordered()) > 0 || compared < commits/2 || read == 0 {
			t.Errorf("seed %d: compared %d times, read %d times, open %v", seed, compared, read, m.Unordered())
		}
		t.Logf("old %v: compared %d times, read %d times", old, compared, read)
	}
}

// A guess from a whole reading concerns only rules that the kernel no longer has. What
// commits before the deletion of such a rule have put next to it is not placed by the guess.
func TestOrderAfterGuesses(t *testing.T) {
	seed := rand.Uint64()
	r := rand.New(rand.NewPCG(seed, 1))
	k := &kernelChain{}
	m, id := newMirrorOf(k)
	guessed, compared := 0, 0
	for compared < 5000 {
		var queue [][]*ruleset.Message
		for range 1 + r.IntN(4) {
			for range 1 + r.IntN(5) {
				k.random(r)
			}
			queue = append(queue, k.commit())
		}
		for _, msgs := range queue {
			if err := m.Commit(msgs, m.Generation()+1); err != nil {
				t.Fatalf("seed %d: %v", seed, err)
			}
			if len(m.Unordered()) > 0 && !m.Order(id, k.read(), false) && r.IntN(2) == 0 {
				guessed++
				m.Order(id, k.read(), true)
			}
		}
		compared++
		if got, want := m.handles(), handles(k.read()); !slices.Equal(got, want) {
			t.Fatalf("seed %d, after %d guesses: rules %v, want %v", seed, guessed, got, want)
		}
	}
	t.Logf("%d guesses", guessed)
}

// What tools do all day does not leave the order open.
func TestUsualCommitsLeaveNoOrderOpen(t *testing.T) {
	for name, batch := range map[string]func(k *kernelChain){
		"append":        func(k *kernelChain) { k.add(); k.add(); k.add() },
		"insert":        func(k *kernelChain) { k.insert() },
		"insert before": func(k *kernelChain) { k.beside(1, false) },
		"add after":     func(k *kernelChain) { k.beside(2, true) },
		"delete":        func(k *kernelChain) { k.remove(k.rules[0]); k.remove(k.rules[2]) },
		"replace inner": func(k *kernelChain) { k.replace(k.rules[1]) },
		"refill":        func(k *kernelChain) { k.flush(); k.add(); k.add(); k.add(); k.add() },
		"swap":          func(k *kernelChain) { k.flush(); k.add() },
	} {
		for _, old := range []bool{false, true} {
			if old && name == "replace inner" {
				continue
			}
			k := &kernelChain{old: old}
			for range 3 {
				k.add()
			}
			k.commit()
			m, _ := newMirrorOf(k)
			batch(k)
			if err := m.Commit(k.commit(), 2); err != nil {
				t.Fatal(err)
			}
			if open := m.Unordered(); len(open) > 0 {
				t.Errorf("%s, old %v: the order is open", name, old)
			}
			if got, want := m.handles(), handles(k.read()); !slices.Equal(got, want) {
				t.Errorf("%s, old %v: rules %v, want %v", name, old, got, want)
			}
		}
	}
}

// A reading that lacks rules, because they are deleted already, settles the order of
// the others if nothing more is awaited.
func TestOrderByGuess(t *testing.T) {
	k := &kernelChain{}
	for range 4 {
		k.add()
	}
	k.commit()
	m, id := newMirrorOf(k)
	k.remove(k.rules[3])
	k.insert()
	if err := m.Commit(k.commit(), 2); err != nil {
		t.Fatal(err)
	}
	now := k.read() // 5 1 2 3
	late := append(slices.Clone(now[:2]), now[3])
	if m.Order(id, late, false) || len(m.Unordered()) != 1 {
		t.Fatal("settled without one of the rules")
	}
	if !m.Order(id, late, true) || len(m.Unordered()) != 0 {
		t.Fatal("not settled")
	}
	if got := m.handles(); !slices.Equal(got, []uint64{5, 1, 2, 3}) {
		t.Errorf("rules %v", got)
	}
}
