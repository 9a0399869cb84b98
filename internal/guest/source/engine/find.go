// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"cmp"
	"net/netip"
	"slices"
	"sync"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/schedule"
)

// Labels of Compose, by which its services are named.
const (
	composeProject = "com.docker.compose.project"
	composeService = "com.docker.compose.service"
)

// Found is a container or a Service that a demand names.
type Found struct {
	Owner port.Owner
	// Dial is where the port is reached, best first. Of a container, all are addresses that
	// are its alone.
	Dial []netip.AddrPort
	// Targets are where a Service leads on to.
	Targets []netip.AddrPort
	// Reason is why it cannot be dialled although it is there, none if Dial is complete.
	Reason port.Reason
}

// Find returns the running containers that a demand names, each once, in no order. A pod or a
// container that several facts are about has the addresses of all of them.
func (t *Table) Find(d port.Demand) (found []Found) {
	if d.Service {
		return nil
	}
	t.mu.RLock()
	defer t.mu.RUnlock()
	for _, f := range t.objects {
		if !f.Stopped && f.Owner.Kind == port.OwnerContainer && names(d, f.Owner) {
			found = AppendFound(found, Found{Owner: f.Owner, Dial: at(f.Addresses, d.Port)})
		}
	}
	return found
}

// AppendFound appends f, or adds where it is reached to an equal one: by its id, or as a pod that
// Kubernetes and its runtime both know by its namespace and name.
func AppendFound(list []Found, f Found) []Found {
	for i := range list {
		o, l := f.Owner, &list[i]
		if l.Owner.Kind != o.Kind || !l.Owner.MayShareCluster(o) || l.Owner.ID != o.ID && (o.Namespace == "" || l.Owner.Name != o.Name || l.Owner.Namespace != o.Namespace) {
			continue
		}
		for _, a := range f.Dial {
			if !slices.Contains(l.Dial, a) {
				l.Dial = append(l.Dial, a)
			}
		}
		if len(l.Owner.Labels) == 0 { // Kubernetes reports a pod without labels
			o.Cluster, l.Owner = cmp.Or(o.Cluster, l.Owner.Cluster), o
		}
		l.Owner.Cluster = cmp.Or(l.Owner.Cluster, o.Cluster) // the pod's runtime does not know it
		return list
	}
	f.Dial = slices.Clone(f.Dial)
	return append(list, f)
}

// names reports whether a demand names a container.
func names(d port.Demand, o port.Owner) bool {
	switch d.Scope {
	case "":
		return o.Name == d.Name
	case o.Namespace:
		return o.Name == d.Name
	case o.Labels[composeProject]:
		return o.Labels[composeService] == d.Name
	}
	return false
}

func at(addresses []netip.Addr, n uint16) []netip.AddrPort {
	out := make([]netip.AddrPort, 0, len(addresses))
	for _, a := range addresses {
		out = append(out, netip.AddrPortFrom(a, n))
	}
	return out
}

// watchers are signals of those who want to look again when something changed. The zero value
// is ready.
type watchers struct {
	mu   sync.Mutex
	list []schedule.Signal
}

// Watch returns a signal that is notified after each change of what Find returns.
func (t *Table) Watch() schedule.Signal {
	s := schedule.NewSignal()
	t.watchers.mu.Lock()
	defer t.watchers.mu.Unlock()
	t.watchers.list = append(t.watchers.list, s)
	return s
}

// Announce notifies those who watch. Swap does.
func (t *Table) Announce() {
	t.watchers.mu.Lock()
	defer t.watchers.mu.Unlock()
	for _, s := range t.watchers.list {
		s.Notify()
	}
}
