// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/schedule"
)

// ownerWait is how long a port whose decision depends on its owner waits for an
// engine that cannot be asked, or for its process, counted from when all engines are
// live. One that can be asked ends the wait by two lists that do not name an owner,
// and nothing else does. While an engine is starting or stale the wait does not end,
// and after that it begins anew: deny rules fail closed.
const ownerWait = 10 * time.Second

// rootCgroup is the id of the root of the cgroup2 hierarchy, in which no container is.
const rootCgroup = 1

// wait is a publication whose owner is pending.
type wait struct {
	from  time.Time  // when the wait began
	since time.Time  // when the owner became uncertain, which may be long before
	known precedence // how well the owner is known
	lost  bool       // an engine's owner is gone, and something else keeps the port
	left  bool       // the owner has stopped and may start again: the wait does not end
	over  bool       // nobody named an owner in time: it counts as known

	orphan bool // the owner was a Service, of which rules are left: the wait does not end
	search bool // for the process, too, of which engines know nothing
}

// ends reports whether engines, or the time, can end the wait.
func (w *wait) ends() bool { return !w.over && !w.left && !w.orphan }

// waits are the publications whose owner is not known yet. The registry's lock
// guards it.
type waits struct {
	byKey map[port.Key]*wait
	wake  schedule.Signal
	at    time.Time // when Run looks at them by itself, zero if it does not
	live  time.Time // since when all engines are live, zero if they are not

	confirmations []*confirmation // of each engine
}

// doubt is how certain the owner of a publication is.
type doubt struct {
	since   time.Time // since when an engine is expected to name another owner; zero: none is
	process time.Time // since when the process of a socket is not known; zero: it is
	target  time.Time // since when a NAT rule leads to somebody unknown besides the owner; zero: none does
	lost    time.Time // when the owner that an engine named was lost; zero: it was not
	left    bool      // it has stopped, and its NAT rule waits for it to start again

	unclaimed bool // there is a rule of kube-proxy, and no Service
}

// from returns since when something about the owner is not known.
func (d doubt) from() time.Time { return latest(latest(d.since, d.process), d.target) }

// aboutOwner reports whether the owner itself may be another.
func (d doubt) aboutOwner() bool { return !d.since.IsZero() || !d.process.IsZero() }

func (d doubt) and(e doubt) doubt {
	return doubt{
		latest(d.since, e.since), latest(d.process, e.process), latest(d.target, e.target), latest(d.lost, e.lost),
		d.left || e.left, d.unclaimed || e.unclaimed,
	}
}

// uncertain returns how certain the owner of a publication with these bindings
// is. known is how well the owner is known.
func uncertain(ms []member, known precedence, all slots) (d doubt) {
	for _, m := range ms {
		switch {
		case known < container:
			d = d.and(m.uncertain(known, all))
			d.lost = latest(d.lost, m.lost)
		case m.provisional && !claimed(ms, all):
			// The claims are stale, and this is of another container, maybe.
			d = d.and(m.uncertain(process, all))
		default:
			d = d.and(m.unnamedTarget())
		}
	}
	return d
}

// claimed reports whether an engine that is not stale names a container.
func claimed(ms []member, all slots) bool {
	return slices.ContainsFunc(ms, func(m member) bool {
		_, known := m.owner(all)
		return known == container && !m.stale()
	})
}

func latest(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// uncertain returns whether an engine may name another owner for a binding of a
// publication whose owner is known that well.
func (m member) uncertain(known precedence, all slots) (d doubt) {
	b, a := m.binding, m.attribution
	since := b.Since
	if a != nil {
		since, d.left = latest(since, a.since), a.left != ""
	}
	switch {
	case b.Owner.Kind >= port.OwnerService: // an engine declared it
		return doubt{}
	case len(b.Hints.Targets) > 0:
		return m.ruleUncertain(known, all, doubt{since: since, left: d.left})
	case a != nil && a.known:
		return doubt{}
	}
	if a != nil && a.container || known < target && relayed(b) {
		d.since = since
	}
	if known < target && b.Searching {
		d.process = since
	}
	return d
}

// ruleUncertain is uncertain for a NAT rule. own is the doubt about its targets if no
// engine knows them; those on this machine have the owner of the port's listener.
func (m member) ruleUncertain(known precedence, all slots, own doubt) (d doubt) {
	switch a := m.attribution; {
	case a != nil && a.known:
		own.unclaimed = known < service && (m.binding.Maker == port.MakerKubeProxy || m.binding.Maker == port.MakerSwarm)
		if m.provisional || own.unclaimed {
			return own
		}
		return d
	case known >= service:
		return m.unnamedTarget()
	case leaves(m.binding):
		d = own
	}
	for s, addr := range redirected(m.binding) {
		slot := all(s)
		ms := serving(slot, addr)
		if len(ms) == 0 {
			d = d.and(own)
			continue
		}
		_, known := ownerOf(ms, slot, all)
		to := uncertain(ms, known, all)
		to.since, to.lost = latest(to.since, to.lost), time.Time{}
		d = d.and(to)
	}
	return d
}

// unnamedTarget is the doubt about a NAT rule of a port whose owner is known: it may
// lead to somebody else whom an engine names later. A target that has stopped does not
// prolong it, because the port is not its own.
func (m member) unnamedTarget() (d doubt) {
	if a := m.attribution; a != nil && a.unnamed {
		d.target = latest(m.binding.Since, a.since)
	}
	return d
}

// targetDoubt is the doubt about a NAT rule that diverts what is dialled of another
// port, whose owner is known that well.
func (m member) targetDoubt(known precedence, all slots) doubt {
	if known == container {
		known = target // the rule's owner is another one
	}
	d := m.uncertain(known, all)
	return doubt{target: latest(d.from(), m.lost), left: d.left}
}

// relayed reports whether a socket may serve a container though it is not in the
// container's cgroup: its program is one by which engines relay or reserve ports,
// or it is not known which one it is.
func relayed(b *kept) bool {
	if b.Owner.Kind == port.OwnerUnknown {
		return b.Hints.Cgroup != rootCgroup
	}
	if b.Hints.Cgroup > rootCgroup && len(b.Hints.Paths) == 0 {
		return true // of a cgroup that is gone, or cannot be seen
	}
	switch relayName(b.Owner.Name) {
	case "docker-proxy", "dockerd", "rootlesskit", "rootlessport", "slirp4netns", "pasta", "passt", "conmon", "podman",
		"nerdctl", "sleep", "crio", "kube-proxy":
		return true
	}
	return false
}

// relayName returns the name of a program without what is added to that of some relays:
// "pasta.avx2", and "rootlesskit-doc" (docker-proxy, truncated).
func relayName(name string) string {
	if i := strings.IndexAny(name, ".-"); i > 0 && name != "docker-proxy" && name != "kube-proxy" {
		return name[:i]
	}
	return name
}

// enginesLive reports whether every source that has facts is live.
func (r *Registry) enginesLive() bool {
	live := 0
	for _, s := range r.sources {
		if !r.engines[s.name] {
			continue
		}
		if s.status.State != Live && s.status.State != Disabled {
			return false
		}
		live++
	}
	return live == len(r.engines)
}

// engineStateChanged looks again at what depends on whether engines are live: claims
// of s, facts, and NAT rules whose attribution may have been old. The waits begin
// anew when the last engine became live.
func (r *Registry) engineStateChanged(s *source) {
	was, live := !r.waits.live.IsZero(), r.enginesLive()
	switch {
	case !live:
		r.waits.live = time.Time{}
		for _, c := range r.waits.confirmations {
			c.reset()
		}
	case !was:
		r.waits.live = r.now()
	}
	dirty := new(touched)
	for _, b := range s.set {
		dirty.mark(b.Slot(), 0)
	}
	r.owners.all(r.now(), live, func(s port.Slot) { dirty.mark(s, 0) })
	if live {
		r.confirm(dirty)
	}
	r.merge(dirty)
	if live {
		r.waits.wake.Notify()
	}
}

// decide sets the decision of m, whose port had an owner of that kind, and notes whether it
// waits for an owner.
func (r *Registry) decide(m *merged, old port.OwnerKind) {
	p, d := &m.Publication, m.doubt
	if len(r.engines) == 0 {
		d.since, d.target = time.Time{}, time.Time{}
	}
	now := r.now()
	w := r.waits.next(m, d, old, now)
	if w == nil {
		p.OwnerPending = false
		delete(r.waits.byKey, p.Key)
		r.apply(p)
		return
	}
	r.waits.set(p.Key, w, now)
	if !w.lost && !d.aboutOwner() {
		// Another owner can only add a denial.
		p.OwnerPending = false
		if r.apply(p); !p.Decision.Allow {
			return
		}
	}
	p.OwnerPending = !w.over
	r.apply(p)
}

// next returns the wait of m, whose port had an owner of that kind: the one that it has, or
// another. It is nil if there is nothing to wait for.
func (ws *waits) next(m *merged, d doubt, old port.OwnerKind, now time.Time) *wait {
	kind, w := m.Owner.Kind, ws.byKey[m.Key]
	next := wait{from: now, since: d.from(), known: m.known, left: d.left, search: !d.process.IsZero()}
	// Of a deleted Service, rules may be left that lead to pods, or into a swarm.
	deleted := old == port.OwnerService && kind == port.OwnerContainer
	if next.orphan = d.unclaimed && m.known < service && (w != nil && w.orphan || deleted); next.orphan {
		next.lost = true
		if w != nil && w.orphan && d.left == w.left {
			return w
		}
		return &wait{from: now, since: next.since, known: next.known, lost: true, left: next.left, orphan: true}
	}
	if kind < port.OwnerService && !d.lost.IsZero() && !ws.past(d.lost, now) {
		next.lost, next.since = true, latest(next.since, d.lost)
	}
	switch {
	case next.since.IsZero():
		return nil
	case w != nil && !w.orphan && !next.since.After(w.since) && d.left == w.left && kind >= old && m.known >= w.known &&
		(w.over || w.lost || !next.lost):
		w.known, w.lost, w.search = m.known, next.lost, next.search
		return w
	}
	return new(next)
}

// past reports whether nobody named an owner in time after one was lost.
func (ws *waits) past(lost, now time.Time) bool { return ws.settled(lost, false, now) }

// ended reports whether nobody named an owner in time.
func (ws *waits) ended(w *wait, now time.Time) bool {
	return w.ends() && ws.settled(w.from, w.search, now)
}

// settled reports whether a wait that began then is over: all engines are live, those
// that can be asked have answered, and the time for the others has passed, and for the
// search of a process.
func (ws *waits) settled(from time.Time, search bool, now time.Time) bool {
	if ws.live.IsZero() {
		return false
	}
	end, timed := ws.end(from, search)
	return (!timed || !end.After(now)) && !slices.ContainsFunc(ws.confirmations, func(c *confirmation) bool {
		return !c.timed() && !c.settled(ws.asking(from))
	})
}

// end returns until when a wait that began then lasts at least. timed is false if
// engines alone decide that.
func (ws *waits) end(from time.Time, search bool) (t time.Time, timed bool) {
	timed = search || len(ws.confirmations) == 0 || slices.ContainsFunc(ws.confirmations, (*confirmation).timed)
	return latest(from, ws.live).Add(ownerWait), timed
}

// asking returns from when on engines are asked for a wait that began then.
func (ws *waits) asking(from time.Time) time.Time { return latest(from, ws.live).Add(reportTime) }

// look returns when to look at a wait again, at the latest, the zero time if an engine's
// answer is awaited. It appends the engines that are to be asked now.
func (ws *waits) look(w *wait, now time.Time, due []*confirmation) (next time.Time, _ []*confirmation) {
	if end, timed := ws.end(w.from, w.search); timed && end.After(now) {
		next = end
	}
	for _, c := range ws.confirmations {
		switch t := c.due(ws.asking(w.from)); {
		case t.IsZero():
		case t.After(now):
			next = earliest(next, t)
		case !slices.Contains(due, c):
			due = append(due, c)
		}
	}
	return next, due
}

// earliest returns the earlier of two times, of which the zero time is none.
func earliest(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}

// set notes a wait, and wakes Run if that is to look at it earlier than planned.
func (ws *waits) set(k port.Key, w *wait, now time.Time) {
	if ws.byKey == nil {
		ws.byKey = make(map[port.Key]*wait)
	}
	ws.byKey[k] = w
	if ws.live.IsZero() || !w.ends() {
		return
	}
	next, due := ws.look(w, now, nil)
	if len(due) > 0 || ws.ended(w, now) || !next.IsZero() && (ws.at.IsZero() || next.Before(ws.at)) {
		ws.wake.Notify()
	}
}

// Run asks engines for lists and ends the waits for owners that none names. It returns
// when ctx ends.
func (r *Registry) Run(ctx context.Context) error {
	for {
		next, asks := r.endWaits()
		for _, ask := range asks {
			ask()
		}
		if !next.IsZero() { // by Options.Now, which may be another clock
			next = time.Now().Add(next.Sub(r.now()))
		}
		if err := schedule.Wait(ctx, next, r.waits.wake); err != nil {
			return err
		}
	}
}

// endPause is between two looks at the waits, of which there may be thousands.
const endPause = 250 * time.Millisecond

// endWaits decides what has waited long enough, and returns what asks engines for lists,
// and when to look again, the zero time if nothing waits for a time.
func (r *Registry) endWaits() (next time.Time, asks []func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.waits.at = time.Time{}
	if r.waits.live.IsZero() {
		return next, nil
	}
	now, dirty := r.now(), new(touched)
	var due []*confirmation
	for k, w := range r.waits.byKey {
		switch {
		case !w.ends():
		case r.waits.ended(w, now):
			w.over = true
			dirty.mark(k.Slot(), 0)
		default:
			var t time.Time
			t, due = r.waits.look(w, now, due)
			next = earliest(next, t)
		}
	}
	r.merge(dirty)
	for _, c := range due {
		asks = append(asks, r.request(c, now))
	}
	if !next.IsZero() {
		next = latest(next, now.Add(endPause))
	}
	r.waits.at = next
	return next, asks
}
