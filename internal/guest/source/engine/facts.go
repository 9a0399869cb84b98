// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"maps"
	"net/netip"
	"slices"
	"sync"

	"github.com/fairlead/fairlead/internal/guest/cgroup"
	"github.com/fairlead/fairlead/internal/guest/registry"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/schedule"
)

// Fact is all that one container, or one pod, is known by.
type Fact struct {
	Owner     port.Owner
	ID        string       // looked for in cgroup paths if it is 64 hexadecimal digits and Path is not known
	Cgroup    uint64       // inode of its cgroup2 directory, 0 if not known
	Path      string       // its cgroup as /proc/PID/cgroup names it, "" if not known
	User      uint32       // as whom its engine runs, who may own its cgroups
	Addresses []netip.Addr // that are its alone, on networks that the guest reaches
	Stopped   bool         // it had these addresses; nothing else counts
}

// Table is a set of facts by object. The zero value is empty and ready.
type Table struct {
	mu        sync.RWMutex
	objects   map[string]Fact
	cgroups   map[uint64]string
	paths     map[string]string
	ids       map[string]string
	addresses map[netip.Addr][]string
	stopped   map[netip.Addr][]string // as addresses, of containers that have stopped

	// CgroupUser returns the user who owns the directory of a cgroup that names a
	// container by its id. It does not wait. If nil, a name is believed no
	// matter who made the cgroup. Set it before the first use.
	CgroupUser func(path string) (uid uint32, found bool)

	notify   func([]registry.AttributionKey)
	change   schedule.Signal // nil if nobody waits
	watchers watchers
	asks     asks
}

var _ registry.Facts = (*Table)(nil)

// Notify implements registry.Facts.
func (t *Table) Notify(f func(changed []registry.AttributionKey)) { t.notify = f }

// Put replaces what is known of object.
func (t *Table) Put(object string, f Fact) {
	t.Swap(nil, map[string]Fact{object: f})
}

// Remove forgets object.
func (t *Table) Remove(object string) { t.Swap([]string{object}, nil) }

// Retain forgets every object for which keep is false. No lock is held while keep runs.
func (t *Table) Retain(keep func(object string, f Fact) bool) {
	t.mu.RLock()
	objects := maps.Clone(t.objects)
	t.mu.RUnlock()
	var gone []string
	for object, f := range objects {
		if !keep(object, f) {
			gone = append(gone, object)
		}
	}
	t.Swap(gone, nil)
}

// Swap forgets the objects that are gone and then puts others, as one step: what
// is in both is not gone meanwhile.
func (t *Table) Swap(gone []string, put map[string]Fact) {
	var changed []registry.AttributionKey
	news := false // also of a container without anything that it is known by: it has a name
	t.mu.Lock()
	for _, object := range gone {
		f, had := t.objects[object]
		if _, back := put[object]; had && !back {
			t.remove(object)
			changed, news = f.keys(changed), true
		}
	}
	for object, f := range put {
		old, had := t.objects[object]
		if had && old.equal(f) {
			continue
		}
		t.remove(object)
		t.insert(object, f)
		changed, news = f.keys(old.keys(changed)), true
	}
	if len(changed) > 0 {
		t.change.Notify()
	}
	t.mu.Unlock()
	if news {
		t.Announce()
	}
	if t.notify != nil && len(changed) > 0 {
		t.notify(changed)
	}
}

// keys appends what f is known by.
func (f Fact) keys(out []registry.AttributionKey) []registry.AttributionKey {
	if f.Cgroup != 0 && !f.Stopped {
		out = append(out, registry.AttributionKey{Cgroup: f.Cgroup})
	}
	if f.Path != "" && f.Path != "/" && !f.Stopped {
		out = append(out, registry.AttributionKey{Path: f.Path})
	}
	if cgroup.IsContainerID(f.ID) && !f.Stopped {
		out = append(out, registry.AttributionKey{Path: f.ID})
	}
	for _, a := range f.Addresses {
		out = append(out, registry.AttributionKey{Address: a})
	}
	return out
}

func (f Fact) equal(g Fact) bool {
	return f.Owner.Equal(g.Owner) && f.ID == g.ID && f.Cgroup == g.Cgroup && f.Path == g.Path && f.User == g.User && f.Stopped == g.Stopped &&
		slices.Equal(f.Addresses, g.Addresses)
}

func (t *Table) insert(object string, f Fact) {
	if t.objects == nil {
		t.objects = make(map[string]Fact)
		t.cgroups = make(map[uint64]string)
		t.paths = make(map[string]string)
		t.ids = make(map[string]string)
		t.addresses = make(map[netip.Addr][]string)
		t.stopped = make(map[netip.Addr][]string)
	}
	t.objects[object] = f
	if f.Stopped {
		for _, a := range f.Addresses {
			t.stopped[a] = append(t.stopped[a], object)
		}
		return
	}
	if f.Cgroup != 0 {
		t.cgroups[f.Cgroup] = object
	}
	if f.Path != "" && f.Path != "/" {
		t.paths[f.Path] = object
	}
	if cgroup.IsContainerID(f.ID) {
		t.ids[f.ID] = object
	}
	for _, a := range f.Addresses {
		t.addresses[a] = append(t.addresses[a], object)
	}
}

func (t *Table) remove(object string) {
	f, ok := t.objects[object]
	if !ok {
		return
	}
	delete(t.objects, object)
	if t.cgroups[f.Cgroup] == object {
		delete(t.cgroups, f.Cgroup)
	}
	if t.paths[f.Path] == object {
		delete(t.paths, f.Path)
	}
	if t.ids[f.ID] == object {
		delete(t.ids, f.ID)
	}
	at := t.addresses
	if f.Stopped {
		at = t.stopped
	}
	for _, a := range f.Addresses {
		others := slices.DeleteFunc(slices.Clone(at[a]), func(o string) bool { return o == object })
		if len(others) == 0 {
			delete(at, a)
		} else {
			at[a] = others
		}
	}
}

// ByCgroup implements registry.Facts.
func (t *Table) ByCgroup(id uint64) (port.Owner, bool) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	object, ok := t.cgroups[id]
	return t.objects[object].Owner, ok && id != 0
}

// ByCgroupPath implements registry.Facts. A path inside a container's cgroup is the
// container's; the deepest container that is known wins. The path that the engine
// reported decides where it is known. Otherwise the container's id does, if root or
// the engine's user made the cgroup: any user with a cgroup tree of their own can
// make one with such a name.
func (t *Table) ByCgroupPath(path string) (port.Owner, bool) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	for p := range cgroup.Ancestors(path) {
		if object, ok := t.paths[p]; ok {
			return t.objects[object].Owner, true
		}
		if object, ok := t.ids[cgroup.ContainerID(p)]; ok && t.trusted(p, t.objects[object]) {
			return t.objects[object].Owner, true
		}
	}
	return port.Owner{}, false
}

// trusted reports whether a cgroup that has a container's id in its name is the
// container's.
func (t *Table) trusted(path string, f Fact) bool {
	if f.Path != "" && f.Path != "/" {
		return false // it is another one
	}
	if t.CgroupUser == nil {
		return true
	}
	uid, found := t.CgroupUser(path)
	return found && (uid == 0 || uid == f.User)
}

// ByAddress implements registry.Facts. An address that two owners claim is nobody's.
func (t *Table) ByAddress(addr netip.Addr) (port.Owner, bool) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	objects := t.addresses[addr.Unmap()]
	if len(objects) == 0 {
		return port.Owner{}, false
	}
	owner := t.objects[objects[0]].Owner
	for _, o := range objects[1:] {
		if !t.objects[o].Owner.Same(owner) {
			return port.Owner{}, false
		}
	}
	return owner, true
}

// StoppedAt implements registry.Facts.
func (t *Table) StoppedAt(addr netip.Addr) (port.Owner, bool) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	objects := t.stopped[addr.Unmap()]
	if len(objects) == 0 {
		return port.Owner{}, false
	}
	return t.objects[objects[0]].Owner, true
}

// Fact returns what is known of object.
func (t *Table) Fact(object string) (Fact, bool) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	f, ok := t.objects[object]
	return f, ok
}
