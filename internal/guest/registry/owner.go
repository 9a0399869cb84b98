// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/fairlead/fairlead/internal/port"
)

// Facts names owners. Each engine source keeps its own and answers from what its
// engine last reported. All methods may be called from any goroutine, and none
// waits for an engine. A false answer means "not known here", never "nobody".
//
// A socket's owner is looked up by the id of its cgroup (sk_cgrp_data, the inode
// of the cgroup2 directory), and then by its cgroup paths: a container has
// cgroups of its own inside, and cgroup v1 has no ids. A NAT rule's owner is
// looked up by the address that it sends to. A Service that claims the same port
// is preferred over the container or pod behind it.
type Facts interface {
	ByCgroup(id uint64) (port.Owner, bool)
	ByCgroupPath(path string) (port.Owner, bool)
	ByAddress(addr netip.Addr) (port.Owner, bool)
	// StoppedAt returns the container that had an address and has stopped.
	StoppedAt(addr netip.Addr) (port.Owner, bool)
	// Notify has f called after each change, with all keys for which an answer
	// may differ now. It is called once, before the source runs. f may ask for
	// answers; it is called by several goroutines.
	Notify(f func(changed []AttributionKey))
}

// arbiter asks all engines who owns what, in the order of their sources.
type arbiter struct {
	engines []engine
}

// engine is one source's facts.
type engine struct {
	Facts

	stale func() bool // what it reported last may be old
}

// answer is what the engines' facts say about hints.
type answer struct {
	owner   port.Owner
	known   bool
	stale   bool // only engines that are stale name it
	unnamed bool // no engine knows one of the targets outside this machine

	rivals  []port.Owner // different owners that engines name; none is known then
	targets []port.Owner // owners of a NAT rule's targets, if they are not all one's
}

// owner returns the owner that the engines' facts name for hints.
func (a *arbiter) owner(h port.Hints) answer {
	if len(h.Targets) > 0 {
		return a.byTargets(h.Targets)
	}
	if h.Cgroup != 0 {
		if ans := a.ask(func(f Facts) (port.Owner, bool) { return f.ByCgroup(h.Cgroup) }); ans.decided() {
			return ans
		}
	}
	for _, path := range h.Paths {
		if ans := a.ask(func(f Facts) (port.Owner, bool) { return f.ByCgroupPath(path) }); ans.decided() {
			return ans
		}
	}
	return answer{}
}

func (ans *answer) decided() bool { return ans.known || len(ans.rivals) > 0 }

// ask returns what all engines say. One that is live is believed before one that is
// stale. Where engines that are as live name different owners, none is known.
func (a *arbiter) ask(by func(Facts) (port.Owner, bool)) (ans answer) {
	for _, e := range a.engines {
		o, ok := by(e.Facts)
		if !ok {
			continue
		}
		switch stale := e.stale(); {
		case !ans.known:
			ans.owner, ans.known, ans.stale = o, true, stale
		case sameContainer(o, ans.owner):
			if ans.stale && !stale { // the others that were named are stale
				ans.stale, ans.rivals = false, nil
			}
			cluster := cmp.Or(ans.owner.Cluster, o.Cluster) // the pod's runtime does not know it
			if ans.owner.Labels == nil {
				ans.owner = o // Kubernetes reports a pod without labels
			}
			ans.owner.Cluster = cluster
		case ans.stale && !stale:
			ans = answer{owner: o, known: true}
		case ans.stale == stale:
			ans.rivals = appendOwner(ans.rivals, o)
		}
	}
	if len(ans.rivals) > 0 {
		return answer{rivals: append([]port.Owner{ans.owner}, ans.rivals...), stale: ans.stale}
	}
	return ans
}

// byTargets returns the owner of all the addresses that a NAT rule sends to.
// Where there are several owners there is none: one would be wrong for the rest.
func (a *arbiter) byTargets(targets []netip.AddrPort) (all answer) {
	one := true
	for i, t := range targets {
		addr := t.Addr()
		ans := a.ask(func(f Facts) (port.Owner, bool) { return f.ByAddress(addr) })
		for _, o := range ans.rivals {
			all.rivals = appendOwner(all.rivals, o)
		}
		all.stale = all.stale || ans.stale
		if one = one && ans.known && (i == 0 || sameContainer(ans.owner, all.owner)); i == 0 {
			all.owner = ans.owner
		}
		all.unnamed = all.unnamed || !ans.decided() && !addr.IsLoopback()
		if ans.known {
			all.targets = appendOwner(all.targets, ans.owner)
		}
	}
	if one {
		all.known, all.targets = true, nil
		return all
	}
	all.owner = port.Owner{}
	return all
}

// Container returns the container that one of these cgroup paths belongs to, most specific
// first, with the facts of live engines alone. It fails closed: if no engine knows one, if
// only stale engines do, and if engines name different ones.
func (r *Registry) Container(paths []string) (port.Owner, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	hints := port.Hints{Paths: paths}
	ans := r.owners.arbiter.owner(hints)
	switch {
	case len(ans.rivals) > 0:
		return port.Owner{}, errors.New("engines name different containers")
	case !ans.known || ans.owner.Kind != port.OwnerContainer:
		return port.Owner{}, errors.New("no engine knows its container")
	case ans.stale:
		return port.Owner{}, fmt.Errorf("the engine of container %q does not answer", ans.owner.Name)
	}
	return r.owners.arbiter.live().owner(hints).owner, nil
}

// live returns an arbiter that asks the live engines alone.
func (a *arbiter) live() *arbiter {
	stale := func(e engine) bool { return e.stale() }
	return &arbiter{engines: slices.DeleteFunc(slices.Clone(a.engines), stale)}
}

// stopped returns the name of the container that had one of the addresses and has
// stopped, "" if there is none.
func (a *arbiter) stopped(targets []netip.AddrPort) (name string) {
	for _, t := range targets {
		for _, e := range a.engines {
			if o, ok := e.StoppedAt(t.Addr()); ok {
				return o.Name
			}
		}
	}
	return ""
}

// appendOwner appends an owner who is not in the list.
func appendOwner(list []port.Owner, o port.Owner) []port.Owner {
	if slices.ContainsFunc(list, func(p port.Owner) bool { return sameContainer(o, p) }) {
		return list
	}
	return append(list, o)
}

// sameContainer reports whether two engines mean one container: the same id, or
// the same name and namespace, as a pod has in Kubernetes and in its runtime, which does
// not know the cluster.
func sameContainer(a, b port.Owner) bool {
	return a.Kind == b.Kind && a.MayShareCluster(b) && (a.ID == b.ID || a.Name == b.Name && a.Namespace == b.Namespace)
}
