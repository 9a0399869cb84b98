// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/compact"
	"github.com/fairlead/fairlead/internal/port/schedule"
	"github.com/fairlead/fairlead/internal/port/table"
)

// Decider applies the rules to a publication that has no decision yet.
// It must be a pure function. The registry may keep another, equal list as Host.
type Decider interface {
	Decide(port.Publication) port.Ruling
}

// Options configures a Registry.
type Options struct {
	Rules  Decider
	Logger *slog.Logger
	Now    func() time.Time // time.Now if nil
}

// Registry is the merged table. A change costs what it touches, not what the
// table holds: bindings are indexed by slot (protocol and port), and only the
// slots that a change names are merged again.
type Registry struct {
	log *slog.Logger
	now func() time.Time

	mu        sync.Mutex
	rules     Decider
	sources   []*source
	slots     map[port.Slot][]member
	redirects redirects
	owners    attributions
	engines   map[string]bool // the sources that have facts
	waits     waits
	// provisional has the slots of what may serve a container and appeared while an
	// engine was not live: its facts and claims may be old.
	provisional map[port.Slot]struct{}
	peak        compact.Peak               // of slots
	complaints  map[string]struct{}        // about labels, that were logged
	holders     Holders                    // nil if no user's engine is asked
	signs       map[uint32]schedule.Signal // see PodmanSigns, by user

	ready   chan struct{} // closed when every source has reported a complete set
	pending int           // sources that have not

	publications *table.Table[port.Key, port.Publication]
	status       *table.Table[string, SourceStatus]
}

// New returns an empty registry.
func New(o Options) *Registry {
	if o.Now == nil {
		o.Now = time.Now
	}
	return &Registry{
		log:          o.Logger,
		now:          o.Now,
		rules:        o.Rules,
		ready:        make(chan struct{}),
		slots:        make(map[port.Slot][]member),
		redirects:    make(redirects),
		owners:       newAttributions(),
		engines:      make(map[string]bool),
		waits:        waits{wake: schedule.NewSignal(), live: o.Now()}, // there are no engines
		provisional:  make(map[port.Slot]struct{}),
		publications: table.New[port.Key, port.Publication](port.Key.Compare),
		status:       table.New[string, SourceStatus](compareString),
	}
}

// Publications is the merged table, the denied ones included. Only the registry writes it.
func (r *Registry) Publications() *table.Table[port.Key, port.Publication] { return r.publications }

// Sources is the state of each source by name. Only the registry writes it.
func (r *Registry) Sources() *table.Table[string, SourceStatus] { return r.status }

// Ready is closed once every source has reported a complete set: before that the
// table lacks ports that exist. Add all feeds first.
func (r *Registry) Ready() <-chan struct{} { return r.ready }

// Incomplete returns the names of the sources that have not reported a complete set. It
// returns none once Ready is closed, and some before.
func (r *Registry) Incomplete() (names []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, s := range r.sources {
		if !s.complete {
			names = append(names, s.name)
		}
	}
	return names
}

// Touch returns once no change is being merged: a sign of life.
func (r *Registry) Touch() {
	r.mu.Lock()
	defer r.mu.Unlock()
}

// SetRules replaces the rules and decides everything anew.
func (r *Registry) SetRules(d Decider) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.rules = d
	dirty := &touched{slots: make([]touchedSlot, 0, len(r.slots))}
	for s := range r.slots {
		dirty.mark(s, 0)
	}
	r.merge(dirty)
}

// AddFacts adds the facts of the source of that name, by which the owners of other
// sources' bindings are found. The order of the calls is the order in which engines
// are asked. Add all facts before the first source runs.
func (r *Registry) AddFacts(source string, f Facts) {
	f.Notify(r.factsChanged)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.engines[source], r.waits.live = true, time.Time{}
	r.owners.arbiter.engines = append(r.owners.arbiter.engines, engine{f, func() bool { return r.stale(source) }})
	ask, _ := f.(Confirmer)
	r.waits.confirmations = append(r.waits.confirmations, &confirmation{ask: ask})
}

// factsChanged merges again what the keys lead to, and costs no more than that.
func (r *Registry) factsChanged(keys []AttributionKey) {
	r.mu.Lock()
	defer r.mu.Unlock()
	dirty := new(touched)
	r.owners.factsChanged(keys, r.now(), !r.waits.live.IsZero(), func(s port.Slot) { dirty.mark(s, 0) })
	r.merge(dirty)
}

// Feed adds a source. The order of the calls is the order in which the sources'
// dial targets are tried.
func (r *Registry) Feed(name string) Feed { return r.feed(name, false) }

// OptionalFeed adds a source that is not listed among the sources while it is live and has
// neither a method nor a warning.
func (r *Registry) OptionalFeed(name string) Feed { return r.feed(name, true) }

func (r *Registry) feed(name string, optional bool) Feed {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := &source{r: r, name: name, optional: optional, order: len(r.sources), set: make(map[string]*kept)}
	r.sources = append(r.sources, s)
	r.pending++
	s.setStatus(SourceStatus{Name: name, State: Starting})
	return s
}

// member is one binding in a slot, with its source, the position of that and what
// the engines' facts tell about it (nil: no hints).
type member struct {
	order       int32
	provisional bool // an engine was not live when this appeared: facts and claims may be old
	found       bool // by its source's first dump: it may be older than its time
	source      *source
	binding     *kept
	attribution *attribution
	// lost is when the port lost the owner that an engine named, and this binding kept it;
	// zero after the wait for another owner.
	lost time.Time
}

// insert adds a binding that an event brought, or a dump (observed is 0; see port.Binding).
// replaced is the member whose origin it has, or empty.
func (r *Registry) insert(src *source, b *kept, observed int64, replaced member) {
	s, live := b.Slot(), !r.waits.live.IsZero()
	m := member{order: int32(src.order), source: src, binding: b, attribution: r.owners.enter(b, r.now, live)}
	m.provisional = !live && b.Owner.Kind < port.OwnerService &&
		(len(b.Hints.Targets) > 0 || m.attribution != nil && m.attribution.container || relayed(b))
	if o := replaced.binding; o != nil && o.Key == b.Key {
		m.found = replaced.found
		if o.Hints.Equal(*b.Hints) {
			m.provisional, m.lost = replaced.provisional, replaced.lost
		}
	}
	if replaced.binding == nil && !src.complete && observed == 0 {
		m.found = true
	}
	if m.provisional {
		r.provisional[s] = struct{}{}
	}
	r.slots[s] = append(r.slots[s], m)
	r.redirects.add(b)
	if o := replaced.binding; o == nil || !o.Hints.Equal(*b.Hints) || !o.Owner.Same(*b.Owner) {
		r.sign(b)
	}
}

func (r *Registry) remove(b *kept) (removed member) {
	s := b.Slot()
	ms := r.slots[s]
	i := slices.IndexFunc(ms, func(m member) bool { return m.binding == b })
	if i < 0 {
		return member{}
	}
	removed = ms[i]
	r.owners.leave(ms[i].attribution, s)
	r.redirects.drop(b)
	if len(ms) == 1 {
		delete(r.slots, s)
		return removed
	}
	r.slots[s] = slices.Delete(ms, i, i+1)
	return removed
}

// confirm takes the facts of all engines for current.
func (r *Registry) confirm(dirty *touched) {
	for s := range r.provisional {
		for i := range r.slots[s] {
			r.slots[s][i].provisional = false
		}
		dirty.mark(s, 0)
	}
	r.provisional = make(map[port.Slot]struct{})
}

// stale reports whether the source of that name is.
func (r *Registry) stale(source string) bool {
	for _, s := range r.sources {
		if s.name == source {
			return s.status.State == Stale
		}
	}
	return false
}

// touched are slots to merge again, in the order in which they were touched: of
// slots that are adjacent in the table, the second is found faster.
type touched struct {
	slots []touchedSlot
	index map[port.Slot]int // into slots; nil while there are few
}

// touchedSlot has the time of the kernel's event that touched a slot, if one did
// (see Binding.Observed).
type touchedSlot struct {
	slot     port.Slot
	observed int64
}

// fewSlots are looked through in no time.
const fewSlots = 8

func (t *touched) mark(s port.Slot, observed int64) {
	i, ok := t.find(s)
	if ok {
		t.slots[i].observed = max(t.slots[i].observed, observed)
		return
	}
	t.slots = append(t.slots, touchedSlot{s, observed})
	switch {
	case t.index != nil:
		t.index[s] = len(t.slots) - 1
	case len(t.slots) > fewSlots:
		t.index = make(map[port.Slot]int, cap(t.slots))
		for i, u := range t.slots {
			t.index[u.slot] = i
		}
	}
}

func (t *touched) find(s port.Slot) (i int, ok bool) {
	if t.index != nil {
		i, ok = t.index[s]
		return i, ok
	}
	i = slices.IndexFunc(t.slots, func(u touchedSlot) bool { return u.slot == s })
	return i, i >= 0
}

// at returns the publication of a slot, which is sorted by key, nil if it has none.
func at(slot []port.Publication, k port.Key) *port.Publication {
	i, ok := slices.BinarySearchFunc(slot, k, func(p port.Publication, k port.Key) int { return p.Compare(k) })
	if !ok {
		return nil
	}
	return &slot[i]
}

func hasOrigin(p *port.Publication, o port.Origin) bool {
	return slices.ContainsFunc(p.Origins, func(q port.OriginInfo) bool { return q.Origin == o })
}

// merge computes the publications of the slots anew, and of those that NAT rules
// send on to them, as one step of the table.
func (r *Registry) merge(dirty *touched) {
	if len(dirty.slots) == 0 {
		return
	}
	r.redirects.spread(dirty)
	r.publications.Update(func(tx *table.Tx[port.Key, port.Publication]) {
		for i := 0; i < len(dirty.slots); i++ {
			t := dirty.slots[i]
			if !r.mergeSlot(tx, t) {
				continue
			}
			// Ports that are sent on to this one have lost their owner as well.
			if from := r.redirects[t.slot]; from != nil {
				from.each(func(s port.Slot) { dirty.slots = append(dirty.slots, touchedSlot{s, 0}) })
			}
		}
	})
}

// mergeSlot merges one slot, and reports whether a port of it lost its owner. It searches the
// table once for what the slot had: most often nothing, or one publication.
func (r *Registry) mergeSlot(tx *table.Tx[port.Key, port.Publication], t touchedSlot) (lost bool) {
	var few [2]port.Publication
	had := few[:0]
	for _, k := range tx.Range(t.slot.Bounds()) {
		p, _ := tx.Get(k)
		had = append(had, p)
	}
	all := func(s port.Slot) []member { return r.slots[s] }
	r.endLosses(t.slot)
	pubs := compile(r.slots[t.slot], all)
	for i := range pubs {
		p := &pubs[i].Publication
		if old := at(had, p.Key); p.Owner.Kind < port.OwnerService && old != nil && old.Owner.Kind >= port.OwnerService {
			r.noteLoss(p)
			lost = true
		}
	}
	if lost {
		pubs = compile(r.slots[t.slot], all)
	}
	for i := range pubs {
		p := &pubs[i].Publication
		old, former := at(had, p.Key), port.OwnerUnknown
		if old != nil {
			p.Since, p.SinceAtLeast, former = old.Since, old.SinceAtLeast, old.Owner.Kind
		}
		p.Observed = t.observed
		r.decide(&pubs[i], former)
		if old != nil && old.Equal(*p) {
			continue
		}
		tx.Put(p.Key, *p)
	}
	for i := range had {
		if k := had[i].Key; !slices.ContainsFunc(pubs, func(p merged) bool { return p.Key == k }) {
			tx.Delete(k)
			delete(r.waits.byKey, k)
		}
	}
	return lost
}

// noteLoss notes that the port of p has lost the owner that an engine named.
func (r *Registry) noteLoss(p *port.Publication) {
	ms := r.slots[p.Slot()]
	for i := range ms {
		if hasOrigin(p, ms[i].binding.Origin) {
			ms[i].lost = r.now()
		}
	}
}

// endLosses forgets the losses of a slot after which nobody was named in time.
func (r *Registry) endLosses(s port.Slot) {
	for i := range r.slots[s] {
		m := &r.slots[s][i]
		if m.lost.IsZero() {
			continue
		}
		if over, _, _ := r.waits.left(m.lost, false, r.now()); over {
			m.lost = time.Time{}
		}
	}
}
