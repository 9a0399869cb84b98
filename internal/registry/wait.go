// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"
	"strings"
	"time"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/schedule"
)

// ownerWait is how long a port whose decision depends on its owner waits for an
// engine to name it, counted from when all engines are live. Engines report a
// container within a second of its ports, more on a machine under load. While an
// engine is starting or stale the wait does not end: deny rules fail closed.
const ownerWait = 10 * time.Second

// rootCgroup is the id of the root of the cgroup2 hierarchy, in which no container is.
const rootCgroup = 1

// wait is a publication whose decision is pending.
type wait struct {
	from  time.Time // when the wait began
	since time.Time // when the owner became uncertain, which may be long before
	lost  bool      // an engine's owner is gone, and something else keeps the port
	left  bool      // the owner has stopped and may start again: the wait does not end
	over  bool      // nobody named an owner in time: it counts as known
}

// waits are the publications whose decision depends on an owner that is not known
// yet. The registry's lock guards it.
type waits struct {
	byKey map[port.Key]*wait
	wake  schedule.Signal
	armed bool      // Run waits for a deadline already
	live  time.Time // since when all engines are live, zero if they are not
}

// doubt is how certain the owner of a publication is.
type doubt struct {
	since time.Time // since when an engine is expected to name another owner; zero: none is
	left  bool      // it has stopped, and its NAT rule waits for it to start again
}

// uncertain returns how certain the owner of a publication with these bindings
// is. known is how well the owner is known.
func uncertain(ms []member, known precedence, all slots) (d doubt) {
	if known == container {
		return d
	}
	for _, m := range ms {
		if !m.uncertain(known, all) {
			continue
		}
		d.since = latest(d.since, m.binding.Since)
		if a := m.attribution; a != nil {
			d.since, d.left = latest(d.since, a.since), d.left || a.left != ""
		}
	}
	return d
}

func latest(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// uncertain reports whether an engine may name another owner for a binding of a
// publication whose owner is known that well.
func (m member) uncertain(known precedence, all slots) bool {
	b, a := m.binding, m.attribution
	switch {
	case b.Owner.Kind >= port.OwnerService: // an engine declared it
		return false
	case len(b.Hints.Targets) == 0:
		return a != nil && !a.known && a.container || known < target && (a == nil || !a.known) && relayed(b)
	case a != nil && a.known:
		return a.provisional || b.Maker == port.MakerKubeProxy && known < service
	}
	return known < service && m.redirectUncertain(all)
}

// redirectUncertain is uncertain for a NAT rule whose targets no engine knows:
// those on this machine have the owner of the port's listener.
func (m member) redirectUncertain(all slots) bool {
	local := false
	for s, addr := range redirected(m.binding) {
		local = true
		ms := serving(all(s), addr)
		if len(ms) == 0 {
			return true
		}
		if _, known := best(ms, all); !uncertain(ms, known, all).since.IsZero() {
			return true
		}
	}
	return !local
}

// relayed reports whether a socket may serve a container though it is not in the
// container's cgroup: its program is one by which engines relay or reserve ports,
// or it is not known which one it is.
func relayed(b *port.Binding) bool {
	if b.Owner.Kind == port.OwnerUnknown {
		return b.Hints.Cgroup != rootCgroup
	}
	if b.Hints.Cgroup > rootCgroup && len(b.Hints.Paths) == 0 {
		return true // of a cgroup that is gone, or cannot be seen
	}
	for _, name := range []string{
		"docker-proxy", "dockerd", "rootlesskit", "rootlessport", "slirp4netns", "pasta", "passt", "conmon", "podman",
		"nerdctl", "crio", "kubelet", "kube-proxy", "k3s", "rke2",
	} {
		if strings.HasPrefix(b.Owner.Name, name) {
			return true
		}
	}
	return false
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

// engineStateChanged begins the waits anew when the last engine became live, and
// looks again at what was attributed by facts that may have been old.
func (r *Registry) engineStateChanged() {
	was := !r.waits.live.IsZero()
	if r.enginesLive() == was {
		return
	}
	if was {
		r.waits.live = time.Time{}
		return
	}
	r.waits.live = r.now()
	dirty := new(touched)
	r.owners.confirm(func(s port.Slot) { dirty.mark(s, 0) })
	r.merge(dirty)
	r.waits.wake.Notify()
}

// decide sets the decision of p, which replaces old, and notes whether it waits
// for an owner.
func (r *Registry) decide(p *port.Publication, d doubt, old port.Publication) {
	if len(r.engines) == 0 {
		p.OwnerPending = false
		p.Decision = r.rules.Decide(*p)
		return
	}
	since, w := d.since, r.waits.byKey[p.Key]
	lost := old.Owner.Kind >= port.OwnerService && p.Owner.Kind < port.OwnerService
	switch {
	case lost, w != nil && w.lost && p.Owner.Kind < port.OwnerService && since.IsZero():
		p.OwnerPending = true
	default:
		p.OwnerPending, lost = !since.IsZero(), false
	}
	if p.OwnerPending && w != nil && w.over && !since.After(w.since) && !lost {
		p.OwnerPending = false
		p.Decision = r.rules.Decide(*p)
		return
	}
	p.Decision = r.rules.Decide(*p)
	switch {
	case !p.Decision.Pending:
		delete(r.waits.byKey, p.Key)
	case w == nil, lost, since.After(w.since), d.left != w.left:
		r.waits.begin(p.Key, wait{from: r.now(), since: since, lost: lost, left: d.left})
	}
}

func (ws *waits) begin(k port.Key, w wait) {
	if ws.byKey == nil {
		ws.byKey = make(map[port.Key]*wait)
	}
	ws.byKey[k] = &w
	if !ws.armed {
		ws.wake.Notify()
	}
}

// Run ends the waits for owners that no engine names. It returns when ctx ends.
func (r *Registry) Run(ctx context.Context) error {
	for {
		if err := schedule.Wait(ctx, r.endWaits(), r.waits.wake); err != nil {
			return err
		}
	}
}

// endWaits decides what has waited long enough, and returns when to look again,
// the zero time if nothing waits for a time.
func (r *Registry) endWaits() (next time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.waits.armed = false
	if r.waits.live.IsZero() {
		return next
	}
	now, dirty := r.now(), new(touched)
	for k, w := range r.waits.byKey {
		switch end := latest(w.from, r.waits.live).Add(ownerWait); {
		case w.over, w.left:
		case !end.After(now):
			w.over = true
			dirty.mark(k.Slot(), 0)
		case next.IsZero() || end.Before(next):
			next = end
		}
	}
	r.merge(dirty)
	r.waits.armed = !next.IsZero()
	return next
}
