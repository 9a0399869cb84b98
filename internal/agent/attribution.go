// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"net/netip"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/registry"
	"github.com/fairlead/fairlead/internal/source/engine"
)

// owners asks all engines who owns what, in the order of their sources. It is
// complete before the first source runs.
type owners struct{ facts []engine.Facts }

var _ registry.Attributor = (*owners)(nil)

// add has a source's facts asked, if it has any, and the registry told when they change.
func (o *owners) add(s Source, r *registry.Registry) {
	if s, ok := s.(interface{ Facts() engine.Facts }); ok {
		f := s.Facts()
		f.Notify(r.Reattribute)
		o.facts = append(o.facts, f)
	}
}

// Owner implements registry.Attributor.
func (o *owners) Owner(h port.Hints) (port.Owner, bool) {
	if len(h.Targets) > 0 {
		return o.byTargets(h.Targets)
	}
	for _, f := range o.facts {
		if owner, ok := f.ByCgroup(h.Cgroup); ok {
			return owner, true
		}
	}
	for _, path := range h.Paths {
		for _, f := range o.facts {
			if owner, ok := f.ByCgroupPath(path); ok {
				return owner, true
			}
		}
	}
	return port.Owner{}, false
}

// byTargets names who has all the addresses that a NAT rule sends to. One of
// several would be a wrong name for the rest.
func (o *owners) byTargets(targets []netip.AddrPort) (owner port.Owner, ok bool) {
	for i, t := range targets {
		has, known := o.byAddress(t.Addr())
		if !known || i > 0 && !sameContainer(has, owner) {
			return port.Owner{}, false
		}
		if i == 0 {
			owner = has
		}
	}
	return owner, true
}

// byAddress names who has an address. One that engines give to different
// containers is nobody's.
func (o *owners) byAddress(a netip.Addr) (owner port.Owner, ok bool) {
	for _, f := range o.facts {
		switch has, known := f.ByAddress(a); {
		case !known:
		case !ok:
			owner, ok = has, true
		case !sameContainer(has, owner):
			return port.Owner{}, false
		}
	}
	return owner, ok
}

// sameContainer reports whether two engines speak of one container: by its id,
// or by its name and namespace, as a pod is to Kubernetes and to its runtime.
func sameContainer(a, b port.Owner) bool {
	return a.ID == b.ID || a.Name == b.Name && a.Namespace == b.Namespace
}
