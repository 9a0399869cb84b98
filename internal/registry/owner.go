// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"net/netip"

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
	// Notify has f called after each change, with all keys for which an answer
	// may differ now. It is called once, before the source runs. f may ask for
	// answers; it is called by several goroutines.
	Notify(f func(changed []AttributionKey))
}

// arbiter asks all engines who owns what, in the order of their sources.
type arbiter struct{ facts []Facts }

// owner returns the owner that the engines' facts name for hints; false means
// that it is not known.
func (a *arbiter) owner(h port.Hints) (port.Owner, bool) {
	if len(h.Targets) > 0 {
		return a.byTargets(h.Targets)
	}
	for _, f := range a.facts {
		if owner, ok := f.ByCgroup(h.Cgroup); ok {
			return owner, true
		}
	}
	for _, path := range h.Paths {
		for _, f := range a.facts {
			if owner, ok := f.ByCgroupPath(path); ok {
				return owner, true
			}
		}
	}
	return port.Owner{}, false
}

// byTargets returns the owner of all the addresses that a NAT rule sends to.
// Where there are several owners there is none: one would be wrong for the rest.
func (a *arbiter) byTargets(targets []netip.AddrPort) (owner port.Owner, ok bool) {
	for i, t := range targets {
		o, known := a.byAddress(t.Addr())
		if !known || i > 0 && !sameContainer(o, owner) {
			return port.Owner{}, false
		}
		if i == 0 {
			owner = o
		}
	}
	return owner, true
}

// byAddress returns the owner of an address. An address that engines give to
// different containers has none.
func (a *arbiter) byAddress(addr netip.Addr) (owner port.Owner, ok bool) {
	for _, f := range a.facts {
		switch o, known := f.ByAddress(addr); {
		case !known:
		case !ok:
			owner, ok = o, true
		case !sameContainer(o, owner):
			return port.Owner{}, false
		}
	}
	return owner, ok
}

// sameContainer reports whether two engines mean one container: the same id, or
// the same name and namespace, as a pod has in Kubernetes and in its runtime.
func sameContainer(a, b port.Owner) bool {
	return a.ID == b.ID || a.Name == b.Name && a.Namespace == b.Namespace
}
