// SPDX-License-Identifier: Apache-2.0

package model

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead/fairlead/internal/guest/sink/peer"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/testkit/leak"
	"github.com/fairlead/fairlead/internal/testkit/rounds"
)

func TestMain(m *testing.M) { leak.Main(m) }

// length is that of one sequence.
const length = 100

// The core and the host do what the reference does, and are never wider. At the end of each
// sequence all is as if it had started just then.
func TestRandomOperations(t *testing.T) {
	seed := uint64(rounds.Of(t, "FAIRLEAD_MODEL_SEED", 1))
	for done := 0; done < min(most, rounds.Of(t, "FAIRLEAD_MODEL_OPERATIONS", 100_000)); done += length {
		ops := operations(rand.New(rand.NewPCG(seed, 0)), length)
		if err := run(t, ops); err != nil {
			ops = shrink(t, ops)
			t.Fatalf("seed %d: %v\nafter these operations (run again with FAIRLEAD_MODEL_SEED=%d):\n%s", seed, run(t, ops), seed, list(ops))
		}
		seed++
	}
}

func list(ops []operation) string {
	var b strings.Builder
	for _, o := range ops {
		fmt.Fprintf(&b, "%v,\n", o)
	}
	return b.String()
}

// run runs a sequence in a system of its own, and returns the first difference.
func run(t *testing.T, ops []operation) (err error) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		s, ended := start(ctx, t)
		defer func() {
			s.link.stall(false)
			cancel()
			ended.Wait()
			s.link.set(true, true)
		}()
		r := &runner{t: t, system: s, ref: newReference(time.Now(), s), held: map[port.Key]time.Time{}, began: time.Now()}
		r.ref.rules = agentRules[0]
		for i, o := range slices.Concat(ops, settle()) {
			r.apply(o)
			synctest.Wait()
			if err = r.check(); err != nil {
				err = fmt.Errorf("operation %d, %v: %w", i+1, o, err)
				return
			}
		}
		err = r.checkFresh()
	})
	return err
}

// shrink removes operations without which the sequence fails as well.
func shrink(t *testing.T, ops []operation) []operation {
	t.Helper()
	for size := len(ops) / 2; size > 0; {
		removed := false
		for i := 0; i+size <= len(ops); {
			rest := slices.Concat(ops[:i], ops[i+size:])
			if run(t, rest) != nil {
				ops, removed = rest, true
				continue
			}
			i += size
		}
		if !removed {
			size /= 2
		}
	}
	return ops
}

// runner applies operations to the system and to the reference.
type runner struct {
	t *testing.T
	*system
	ref *reference

	began     time.Time
	policy    ruleset
	held      map[port.Key]time.Time // since when a key is wanted without being allowed
	wanted    map[port.Key]port.Publication
	before    map[port.Key]port.Publication // wanted before this operation
	delivered map[port.Key]port.Publication // what the host was sent
	flakyAt   time.Time                     // since when the flaky sink does not fail
	entries   map[peer.Target]string        // of the peer, before this operation
	peerAt    time.Time                     // since when the peer does not fail
	peerFails bool
	failing   bool
	down      bool
	stalled   bool
	lostAt    time.Time // since when there is no session, zero if there may be one
	takenAt   time.Time // when an address of the host was last taken by others
}

func (r *runner) apply(o operation) {
	ref, n := r.ref, o.n
	ref.now = time.Now()
	if o.kind != sleep && o.kind != rest {
		ref.changed = ref.now
	}
	switch o.kind {
	case putSocket:
		r.put("socket", socket(n)...)
	case putNAT:
		r.put("nat", natRule(n))
	case putClaim:
		e := pick(engines, n[5])
		r.put(e, claim(e, n, ref.now))
	case drop:
		source, id := pick(sources, n[0]), ""
		for i, k := range slices.Sorted(maps.Keys(ref.entries[source])) {
			if i == n[1]%len(ref.entries[source]) {
				id = k
			}
		}
		delete(ref.entries[source], id)
		r.feeds[source].Apply(port.Change{Drop: []port.Origin{{ID: id}}})
	case replace:
		r.replace(pick(sources, n[0]), n[1])
	case stale:
		source := pick(sources, n[0])
		ref.setState(source, "stale")
		r.feeds[source].Stale(errors.New("lost"))
		if !ref.live() {
			for _, f := range r.facts {
				f.lost()
			}
		}
	case nameOwner:
		r.name(pick(engines, n[0]), factKey(n), pick(containers, n[3]))
	case forgetOwner:
		e, k := pick(engines, n[0]), factKey(n)
		if _, ok := ref.facts[e][k]; ok {
			ref.stopped[e][k] = true
		}
		delete(ref.facts[e], k)
		r.facts[e].set(k, nil)
	case setRules:
		ref.rules = pick(agentRules, n[0])
		r.registry.SetRules(ref.rules.compile(r.t))
	case setPolicy:
		r.policy = pick(hostRules, n[0])
		r.host.SetPolicy(r.policy.compile(r.t))
	case sleep:
		time.Sleep(pick(pauses, n[0]))
		ref.now = time.Now()
	case rest:
		r.rest()
	default:
		r.fault(o)
	}
}

// put reports one binding.
func (r *runner) put(source string, bs ...port.Binding) {
	for _, b := range bs {
		r.ref.set(source, b)
	}
	r.feeds[source].Apply(port.Change{Put: bs})
}

// replace reports the whole set, without those of which a bit in gone is set.
func (r *runner) replace(source string, gone int) {
	var set []port.Binding
	for i, id := range slices.Sorted(maps.Keys(r.ref.entries[source])) {
		if gone>>(2*i)&3 == 3 {
			delete(r.ref.entries[source], id)
			continue
		}
		set = append(set, r.ref.entries[source][id].Binding)
	}
	r.ref.setState(source, "live")
	r.feeds[source].Replace(set)
}

func (r *runner) name(engine, key string, o port.Owner) {
	r.ref.facts[engine][key] = o
	delete(r.ref.stopped[engine], key)
	r.facts[engine].set(key, &o)
}

// fault applies what is no source's.
func (r *runner) fault(o operation) {
	now := r.ref.now
	switch o.kind {
	case loseSession, linkDown:
		r.down = r.down || o.kind == linkDown
		r.link.set(r.down, true)
		if r.lostAt.IsZero() {
			r.lostAt = now
		}
	case linkUp:
		r.down, r.stalled = false, false
		r.link.stall(false)
		r.link.set(false, false)
	case stall:
		r.stalled = true
		r.link.stall(true)
	case sinkFails:
		r.failing, r.flakyAt = o.n[0]%5 > 0, now
		r.flaky.set(o.n[0] % 5)
	case stepClock:
		r.clock.step(pick(steps, o.n[0]))
	case peerFails:
		r.peerFails, r.peerAt = o.n[0]%peerFaults > 0, now
		r.peer.fail(o.n[0] % peerFaults)
	case answers:
		r.facts[pick(engines, o.n[0])].setHow(o.n[1] % (answerAfter + len(answerTimes)))
	case takeHostPort:
		r.takenAt = now
		k := anyKey([6]int{1: o.n[0], 2: o.n[1]}, o.n[2])
		r.network.take(address{k.Protocol, k.AddrPort()})
	case freeHostPort:
		r.network.free()
	}
}

// settle are the operations that end all faults.
func settle() (ops []operation) {
	ops = []operation{{kind: linkUp}, {kind: sinkFails}, {kind: peerFails}, {kind: freeHostPort}, {kind: stepClock}}
	for i := range engines {
		ops = append(ops, operation{kind: answers, n: [6]int{i, answerAfter}})
	}
	for i := range sources {
		ops = append(ops, operation{kind: replace, n: [6]int{i}})
	}
	return append(ops, operation{kind: rest})
}

// rest waits until nothing changes any more.
func (r *runner) rest() {
	pause := 100 * time.Second
	if !r.takenAt.IsZero() { // a wildcard is tried again this late
		pause = 11 * time.Minute
	}
	time.Sleep(pause)
	r.ref.now = time.Now()
}

func (r *runner) check() error {
	return errors.Join(r.checkRegistry(), r.checkWanted(), r.checkSinks(), r.checkHost())
}

// quiet reports whether nothing waits for an owner any more, but for what waits forever.
func (r *runner) quiet() bool {
	ref := r.ref
	for _, f := range r.facts {
		if f.asked() {
			return false
		}
	}
	return !ref.liveSince.IsZero() && ref.now.Sub(later(ref.changed, ref.liveSince)) >= steady
}

func (r *runner) checkRegistry() error {
	want := r.ref.step()
	got := maps.Collect(r.registry.Publications().View().All())
	for k := range want {
		if _, ok := got[k]; !ok {
			return fmt.Errorf("%s is not published", k)
		}
	}
	for k, g := range got {
		w := want[k]
		if w == nil {
			return fmt.Errorf("%s is published, and nobody reports it", k)
		}
		if err := r.compare(w, g); err != nil {
			return fmt.Errorf("%s (owner %s %q, reference %s %q): %w", k, g.Owner.Kind, g.Owner.Name, w.owner.Kind, w.owner.Name, err)
		}
	}
	return nil
}

func (r *runner) compare(w *published, g port.Publication) error {
	var origins, entries []string
	for _, o := range g.Origins {
		origins = append(origins, o.Source+" "+o.ID)
	}
	for _, e := range w.entries {
		entries = append(entries, e.Origin.Source+" "+e.Origin.ID)
	}
	slices.Sort(origins)
	slices.Sort(entries)
	switch {
	case !slices.Equal(origins, entries):
		return fmt.Errorf("origins %q, want %q", origins, entries)
	case !slices.Equal(g.Dial, w.dial):
		return fmt.Errorf("dials %v, want %v", g.Dial, w.dial)
	case !g.Owner.Same(w.owner):
		return errors.New("another owner")
	case g.Target != w.rule:
		return fmt.Errorf("rule %d, want %d", g.Target, w.rule)
	}
	v := r.ref.decide(w)
	if g.Decision.Allow && (!v.allow || !slices.Equal(g.Decision.Host, v.host)) {
		return fmt.Errorf("wider than allowed: %+v, want %+v; doubts %q %q", g.Decision, v, w.ownerItems, w.targetItems)
	}
	if !g.Decision.Allow && v.allow && r.quiet() {
		return fmt.Errorf("closed: %+v, want %+v; doubts %q %q", g.Decision, v, w.ownerItems, w.targetItems)
	}
	return nil
}

// checkWanted compares the wanted set with the table of publications.
func (r *runner) checkWanted() error {
	pubs := r.registry.Publications().View()
	was := r.wanted
	r.before = was
	select {
	case <-r.registry.Ready():
	default:
		if r.ref.now.Sub(r.began) < 3*time.Second {
			return nil // the reconciler waits
		}
	}
	r.wanted = maps.Collect(r.reconciler.Wanted().View().All())
	for k, p := range pubs.All() {
		if w, ok := r.wanted[k]; p.Decision.Allow && (!ok || !w.Equal(p)) {
			return fmt.Errorf("%s is allowed, and not wanted as it is", k)
		}
	}
	for k := range r.held {
		if _, ok := r.wanted[k]; !ok {
			delete(r.held, k)
		}
	}
	for k := range r.wanted {
		p, there := pubs.Get(k)
		if there && p.Decision.Allow {
			delete(r.held, k)
			continue
		}
		_, before := was[k]
		since, held := r.held[k]
		if !held {
			since = r.ref.now
			r.held[k] = since
		}
		switch {
		case there && !p.Decision.Withheld():
			return fmt.Errorf("%s is wanted, and forbidden: %+v", k, p.Decision)
		case !before:
			return fmt.Errorf("%s is wanted, and was never allowed", k)
		case r.ref.now.Sub(since) >= holdDown:
			return fmt.Errorf("%s is held for %s", k, r.ref.now.Sub(since))
		}
		for o, q := range pubs.Range(k.Slot().Bounds()) {
			if !q.Decision.Allow && !q.Decision.Withheld() {
				return fmt.Errorf("%s is held beside %s, which is forbidden", k, o)
			}
		}
	}
	return nil
}

// checkSinks compares the sinks in the guest with the wanted set.
func (r *runner) checkSinks() error {
	if !r.failing && r.ref.now.Sub(r.flakyAt) > 11*time.Second {
		held := r.flaky.now()
		if !maps.EqualFunc(held, r.wanted, port.Publication.Equal) {
			return fmt.Errorf("the sink holds %v, want %v", keys(held), keys(r.wanted))
		}
	}
	if err := r.checkPeer(); err != nil {
		return err
	}
	open, _ := r.guest.now()
	for a := range open {
		if !slices.ContainsFunc(slices.Collect(maps.Values(r.wanted)), func(p port.Publication) bool {
			return p.Protocol == a.protocol && slices.Contains(p.Decision.Host, a.AddrPort)
		}) {
			return fmt.Errorf("placeholder %s is open, and nobody wants it", a)
		}
	}
	return nil
}

// checkPeer compares the entries of the foreign peer with the wanted set: none is added
// that nobody wanted before or after an operation, and all are right when the peer does
// not fail.
func (r *runner) checkPeer() error {
	var wishes []wish
	for _, p := range r.wanted {
		for _, a := range p.Decision.Host {
			wishes = append(wishes, wish{p, a})
		}
	}
	wanted := func(t peer.Target, remote string) bool {
		for _, set := range []map[port.Key]port.Publication{r.wanted, r.before} {
			for k, p := range set {
				if k.Protocol == t.Protocol && slices.Contains(p.Decision.Host, t.AddrPort()) && k.AddrPort().String() == remote {
					return true
				}
			}
		}
		return false
	}
	was, now := r.entries, r.peer.now()
	r.entries = now
	for t, remote := range now {
		if _, old := was[t]; !old && !wanted(t, remote) {
			return fmt.Errorf("the peer got %v to %s, which nobody wants", t, remote)
		}
	}
	if r.peerFails || r.ref.now.Sub(r.peerAt) <= 11*time.Second {
		return nil
	}
	have := map[address]bool{}
	for t := range now {
		have[address{t.Protocol, t.AddrPort()}] = true
	}
	if want, _ := award(wishes); !maps.Equal(have, want) {
		return fmt.Errorf("the peer has %v, want %v", have, want)
	}
	return nil
}

func keys(m map[port.Key]port.Publication) (out []string) {
	for k := range m {
		out = append(out, k.String())
	}
	slices.Sort(out)
	return out
}

// checkHost compares the listeners of the host with what it was sent.
func (r *runner) checkHost() error {
	g := r.host.Guests()[0]
	inStep := g.Connected && !r.stalled && !r.down
	if inStep {
		r.lostAt, r.delivered = time.Time{}, r.wanted
	}
	var wishes []wish
	allowed := map[address]bool{}
	for _, p := range r.delivered {
		for _, a := range r.policy.host(p) {
			wishes = append(wishes, wish{p, a})
			allowed[address{p.Protocol, a}] = true
		}
	}
	open, taken := r.network.now()
	for a := range open {
		switch {
		case !allowed[a]:
			return fmt.Errorf("the host listens at %s, which nothing allows", a)
		case !r.lostAt.IsZero() && r.ref.now.Sub(r.lostAt) > grace+time.Second:
			return fmt.Errorf("the host listens at %s, %s after the session was lost", a, r.ref.now.Sub(r.lostAt))
		}
	}
	if !inStep || taken || !r.takenAt.IsZero() && r.ref.now.Sub(r.takenAt) < 11*time.Minute {
		return nil
	}
	want, states := award(wishes)
	if !maps.Equal(open, want) {
		return fmt.Errorf("the host listens at %v, want %v", open, want)
	}
	return r.checkOutcomes(states)
}

// checkOutcomes compares what the agent shows with what the host did.
func (r *runner) checkOutcomes(states map[port.Key][]port.State) error {
	outcomes := r.reconciler.Outcomes().View()
	if !r.failing && !r.peerFails && r.ref.now.Sub(later(r.flakyAt, r.peerAt)) > 11*time.Second {
		for k := range outcomes.All() {
			if _, ok := r.wanted[k]; !ok {
				return fmt.Errorf("%s has outcomes, and nobody wants it", k)
			}
		}
	}
	for k := range r.wanted {
		var got []port.State
		all, _ := outcomes.Get(k)
		for _, o := range all {
			if o.Sink == "hostlink" {
				got = append(got, o.State)
			}
		}
		want := states[k]
		slices.Sort(got)
		slices.Sort(want)
		closed := len(want) == 0 && len(got) == 1 && (got[0] == port.Denied || got[0] == port.Pending)
		if !closed && !slices.Equal(got, want) {
			return fmt.Errorf("%s has outcomes %v, want %v", k, got, want)
		}
	}
	return nil
}
