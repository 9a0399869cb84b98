// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"net/netip"
	"strings"
	"sync"

	"github.com/fairlead/fairlead/internal/port"
)

// Facts names owners. Each source keeps its own and answers from what its
// engine said last; all methods may be called from any goroutine and never
// block on an engine. A false answer means "not known here", never "nobody":
// ask the next source, and then say unknown.
//
// How to use it: for a socket, ByCgroup with the id of its cgroup (sk_cgrp_data,
// the inode of the cgroup2 directory). If that says nothing, because a container
// has cgroups of its own inside, or the id belongs to cgroup v1, translate the
// socket's process to paths (each line of /proc/PID/cgroup) and ask ByCgroupPath.
// For a NAT rule, ByAddress with the address that the rule sends to. A Service
// that claims the same port is preferred over the container or pod behind it.
type Facts interface {
	ByCgroup(id uint64) (port.Owner, bool)
	ByCgroupPath(path string) (port.Owner, bool)
	ByAddress(addr netip.Addr) (port.Owner, bool)
}

// Fact is all that one container, or one pod, is known by.
type Fact struct {
	Owner     port.Owner
	ID        string       // looked for in cgroup paths if it is 64 hexadecimal digits
	Cgroup    uint64       // inode of its cgroup2 directory, 0 if not known
	Path      string       // its cgroup as /proc/PID/cgroup names it, "" if not known
	Addresses []netip.Addr // that are its alone, on networks that the guest reaches
}

// Table is a set of facts by object. The zero value is empty and ready.
type Table struct {
	mu        sync.RWMutex
	objects   map[string]Fact
	cgroups   map[uint64]string
	paths     map[string]string
	ids       map[string]string
	addresses map[netip.Addr][]string
}

var _ Facts = (*Table)(nil)

// Put replaces what is known of object.
func (t *Table) Put(object string, f Fact) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.remove(object)
	if t.objects == nil {
		t.objects = make(map[string]Fact)
		t.cgroups = make(map[uint64]string)
		t.paths = make(map[string]string)
		t.ids = make(map[string]string)
		t.addresses = make(map[netip.Addr][]string)
	}
	t.objects[object] = f
	if f.Cgroup != 0 {
		t.cgroups[f.Cgroup] = object
	}
	if f.Path != "" && f.Path != "/" {
		t.paths[f.Path] = object
	}
	if isContainerID(f.ID) {
		t.ids[f.ID] = object
	}
	for _, a := range f.Addresses {
		t.addresses[a] = append(t.addresses[a], object)
	}
}

// Remove forgets object.
func (t *Table) Remove(object string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.remove(object)
}

// Retain forgets every object for which keep says no.
func (t *Table) Retain(keep func(object string) bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for object := range t.objects {
		if !keep(object) {
			t.remove(object)
		}
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
	for _, a := range f.Addresses {
		var rest []string
		for _, o := range t.addresses[a] {
			if o != object {
				rest = append(rest, o)
			}
		}
		if len(rest) == 0 {
			delete(t.addresses, a)
		} else {
			t.addresses[a] = rest
		}
	}
}

// ByCgroup implements Facts.
func (t *Table) ByCgroup(id uint64) (port.Owner, bool) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	object, ok := t.cgroups[id]
	return t.objects[object].Owner, ok && id != 0
}

// ByCgroupPath implements Facts. A path inside a container's cgroup is the
// container's; the deepest container that is known wins.
func (t *Table) ByCgroupPath(path string) (port.Owner, bool) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	for path != "" && path != "/" {
		if object, ok := t.paths[path]; ok {
			return t.objects[object].Owner, true
		}
		i := strings.LastIndexByte(path, '/')
		if object, ok := t.ids[idOf(path[i+1:])]; ok {
			return t.objects[object].Owner, true
		}
		if i < 0 {
			break
		}
		path = path[:i]
	}
	return port.Owner{}, false
}

// ByAddress implements Facts. An address that two owners claim is nobody's.
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

// idOf takes the container id out of a cgroup's name: "ID", "docker-ID.scope",
// "cri-containerd-ID.scope", "slice:prefix:ID".
func idOf(name string) string {
	name = strings.TrimSuffix(name, ".scope")
	if i := strings.LastIndexAny(name, "-:"); i >= 0 {
		name = name[i+1:]
	}
	if !isContainerID(name) {
		return ""
	}
	return name
}

// isContainerID says whether s can be nothing but a generated container id. A
// name that a person chose could be any directory's.
func isContainerID(s string) bool {
	if len(s) != 64 {
		return false
	}
	for _, c := range []byte(s) {
		if (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return false
		}
	}
	return true
}
