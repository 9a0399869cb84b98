// SPDX-License-Identifier: Apache-2.0

package names

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/fairlead/fairlead/internal/port"
)

// Labels of containers by which Compose tells their project and service.
const (
	composeProject = "com.docker.compose.project"
	composeService = "com.docker.compose.service"
)

// Port is a TCP port that may be reached by names. Owner comes from the guest.
type Port struct {
	Guest string // as the configuration of this host names it
	Key   port.Key
	Other port.Key // of the same port in the other family; the zero key if there is none
	Owner port.Owner
	Alias string // a name that a label gives the owner; empty for none
}

func comparePorts(a, b Port) int {
	return cmp.Or(cmp.Compare(a.Guest, b.Guest), a.Key.Compare(b.Key))
}

// identity is who an owner is.
type identity struct {
	guest     string
	kind      port.OwnerKind
	id, space string
	cluster   string
}

func (p *Port) identity() identity {
	return identity{p.Guest, p.Owner.Kind, p.Owner.ID, p.Owner.Namespace, p.Owner.Cluster}
}

// owner is one that has names.
type owner struct {
	identity
	name    string // as the guest calls it
	aliases []string
	ports   map[uint16]Port
}

// numbers returns the ports in order.
func (o *owner) numbers() []uint16 { return slices.Sorted(maps.Keys(o.ports)) }

// Table is the names of a set of ports. It is immutable.
type Table struct {
	domain string
	guests []string            // labels of this host's guests
	owners []*owner            // in the order of their identity
	known  map[identity]*owner // the same
	named  map[string][]*owner // by alias, without the domain
}

// New makes the names of ports below a domain. Guests are all of this host, connected or not.
// An owner without a whole name or without an identity has none.
func New(ports []Port, guests []string, domain string) *Table {
	t := &Table{domain: domain, known: make(map[identity]*owner), named: make(map[string][]*owner)}
	for _, g := range guests {
		t.guests = append(t.guests, Label(g))
	}
	for _, p := range slices.SortedFunc(slices.Values(ports), comparePorts) {
		aliases := slices.DeleteFunc(aliasesOf(p), func(a string) bool { return t.reserved(a, p.Guest) })
		if len(aliases) == 0 {
			continue
		}
		id := p.identity()
		o := t.known[id]
		if o == nil {
			o = &owner{identity: id, name: p.Owner.Name, ports: make(map[uint16]Port)}
			t.known[id] = o
			t.owners = append(t.owners, o)
		}
		for _, a := range aliases {
			if !slices.Contains(o.aliases, a) {
				o.aliases = append(o.aliases, a)
			}
		}
		o.add(p)
	}
	slices.SortFunc(t.owners, func(a, b *owner) int {
		return cmp.Or(cmp.Compare(a.guest, b.guest), cmp.Compare(a.kind, b.kind), cmp.Compare(a.space, b.space), cmp.Compare(a.id, b.id))
	})
	for _, o := range t.owners {
		slices.SortStableFunc(o.aliases, func(a, b string) int { return cmp.Compare(strings.Count(a, "."), strings.Count(b, ".")) })
		for _, a := range o.aliases {
			t.named[a] = append(t.named[a], o)
		}
	}
	return t
}

// add adds a port. Of several with one number the nearest is used, in both families.
func (o *owner) add(p Port) {
	old, had := o.ports[p.Key.Port]
	switch other, ok := old.Key.OtherFamily(); {
	case !had || nearer(p.Key.Address, old.Key.Address):
		o.ports[p.Key.Port] = p
	case ok && other == p.Key:
		old.Other = p.Key
		o.ports[p.Key.Port] = old
	}
}

// nearer reports whether an owner's port at guest address a is used rather than that at b:
// the loopback, then a wildcard, then any other.
func nearer(a, b netip.Addr) bool {
	rank := func(ip netip.Addr) int {
		switch {
		case ip == port.Loopback(ip):
			return 0
		case port.IsWildcard(ip):
			return 1
		}
		return 2
	}
	return rank(a) < rank(b)
}

// aliasesOf returns the names of a port's owner, without the domain, also reserved ones. A container that a user's
// own engine names has none: it could take the name of another one.
func aliasesOf(p Port) (list []string) {
	o := &p.Owner
	if p.Key.Protocol != port.TCP || o.ID == "" || o.NameCut || o.Held != nil {
		return nil
	}
	add := func(parts ...string) {
		labels := make([]string, len(parts))
		for i, part := range parts {
			if labels[i] = Label(part); labels[i] == "" {
				return
			}
		}
		list = append(list, strings.Join(labels, "."))
	}
	if p.Alias != "" {
		add(p.Alias)
		add(p.Alias, p.Guest)
	}
	switch o.Kind {
	case port.OwnerContainer:
		add(o.Name)
		if service, project := o.Labels[composeService], o.Labels[composeProject]; service != "" && project != "" {
			add(service)
			add(service, project)
			add(service, project, p.Guest)
		}
		add(o.Name, p.Guest)
	case port.OwnerService:
		add(o.Name)
		add(o.Name, o.Namespace)
		add(o.Name, o.Namespace, p.Guest)
		if o.Namespace == "" { // of Swarm, in no stack
			add(o.Name, p.Guest)
		}
	}
	return list
}

// Outcome is what a name leads to.
type Outcome uint8

// What a name can lead to.
const (
	Unknown   Outcome = iota // nothing
	Leads                    // one port
	Choice                   // one owner with several ports, or without the one that was asked for
	Ambiguous                // several owners
)

// Found is what became of a name.
type Found struct {
	Outcome Outcome
	Port    Port     // if it leads to one
	Names   []string // whole names of a choice, or of an ambiguous name's owners; those without one are missing
}

// candidate is an owner that a name may mean, with the port in the name or 0.
type candidate struct {
	*owner
	port uint16
}

// candidates returns what a name may mean.
func (t *Table) candidates(name string) (list []candidate) {
	for _, o := range t.named[name] {
		list = append(list, candidate{o, 0})
	}
	if first, rest, ok := strings.Cut(name, "."); ok {
		if n, isPort := portLabel(first); isPort {
			for _, o := range t.named[rest] {
				if !t.reserved(name, o.guest) {
					list = append(list, candidate{o, n})
				}
			}
		}
	}
	return list
}

// reserved reports whether a name is below that of another guest. Else a container of one guest
// could take the name of one of another, by the label of a Compose project.
func (t *Table) reserved(name, guest string) bool {
	i := strings.LastIndexByte(name, '.')
	return i >= 0 && name[i+1:] != Label(guest) && slices.Contains(t.guests, name[i+1:])
}

// Find looks a name up that is below the domain. Of an owner with several ports a name
// without one means usual, if the owner has it: 80 or 443.
func (t *Table) Find(name string, usual uint16) Found {
	list := t.candidates(name)
	switch {
	case len(list) == 0:
		return Found{}
	case len(list) > 1:
		f := Found{Outcome: Ambiguous}
		for _, c := range list {
			if best := t.best(c.owner); best != "" && !slices.Contains(f.Names, best) {
				f.Names = append(f.Names, best)
			}
		}
		return f
	}
	c := list[0]
	n := c.port
	if n == 0 {
		n = usual
	}
	if p, ok := c.ports[n]; ok {
		return Found{Outcome: Leads, Port: p}
	}
	if c.port == 0 && len(c.ports) == 1 {
		return Found{Outcome: Leads, Port: c.ports[c.numbers()[0]]}
	}
	f := Found{Outcome: Choice}
	for _, n := range c.numbers() {
		if names := t.withPort(c.owner, n); len(names) > 0 {
			f.Names = append(f.Names, names[0])
		}
	}
	return f
}

// alone reports whether a name means an owner, and nobody else.
func (t *Table) alone(o *owner, name string) bool {
	list := t.candidates(name)
	return len(list) == 1 && list[0].owner == o
}

// withPort returns the whole names with a port that mean that port of an owner alone,
// shortest first.
func (t *Table) withPort(o *owner, n uint16) (list []string) {
	for _, a := range o.aliases {
		name := strconv.Itoa(int(n)) + "." + a
		if t.alone(o, name) {
			list = append(list, name+"."+t.domain)
		}
	}
	return list
}

// best returns the shortest whole name that means an owner alone, or "".
func (t *Table) best(o *owner) string {
	if all := t.namesOf(o); len(all) > 0 {
		return all[0]
	}
	return ""
}

// namesOf returns the whole names that mean an owner alone, shortest first.
func (t *Table) namesOf(o *owner) (list []string) {
	for _, a := range o.aliases {
		if t.alone(o, a) {
			list = append(list, a+"."+t.domain)
		}
	}
	return list
}

// NamesOf returns the whole names of a port, shortest first: with its number if its owner
// has several. A UDP port has none.
func (t *Table) NamesOf(p Port) (list []string) {
	o := t.known[p.identity()]
	if o == nil || p.Key.Protocol != port.TCP || o.ports[p.Key.Port].Owner.ID == "" {
		return nil
	}
	if len(o.ports) > 1 {
		return t.withPort(o, p.Key.Port)
	}
	return t.namesOf(o)
}

// NameOf returns the shortest whole name that means a port's owner alone, without a number; "" if
// there is none, and of a UDP port. It leads to a port that such a name means: 80 over HTTP, 443
// over TLS.
func (t *Table) NameOf(p Port) string {
	if o := t.known[p.identity()]; o != nil && p.Key.Protocol == port.TCP {
		return t.best(o)
	}
	return ""
}

// Entry is an owner with its names, for display. Owner, Namespace and OwnerName come from
// the guest.
type Entry struct {
	Names     []string       `json:"names"`     // whole names that lead to it, shortest first
	Ambiguous []string       `json:"ambiguous"` // whole names that others have, too
	Kind      port.OwnerKind `json:"kind"`
	OwnerName string         `json:"ownerName"`
	Namespace string         `json:"namespace,omitempty"`
	Guest     string         `json:"guest"`
	Ports     []uint16       `json:"ports"` // of the guest
}

// Entries returns all owners, in the order of their first names.
func (t *Table) Entries() []Entry {
	list := make([]Entry, 0, len(t.owners))
	for _, o := range t.owners {
		e := Entry{
			Names: []string{}, Ambiguous: []string{}, Kind: o.kind, OwnerName: o.name, Namespace: o.space, Guest: o.guest, Ports: o.numbers(),
		}
		e.Names = append(e.Names, t.namesOf(o)...)
		for _, a := range o.aliases {
			if whole := a + "." + t.domain; !slices.Contains(e.Names, whole) {
				e.Ambiguous = append(e.Ambiguous, whole)
			}
		}
		list = append(list, e)
	}
	slices.SortStableFunc(list, func(a, b Entry) int { return cmp.Compare(a.first(), b.first()) })
	return list
}

// first is the name by which entries are in order.
func (e *Entry) first() string {
	if len(e.Names) > 0 {
		return e.Names[0]
	}
	return e.Ambiguous[0]
}

// Listener is an address at which names are served.
type Listener struct {
	Protocol string         `json:"protocol"` // "http" or "tls"
	Address  netip.AddrPort `json:"address"`
	Open     bool           `json:"open"`
	Error    string         `json:"error"` // why it is not open
}

// Report is all that is known of names. Its form is stable.
type Report struct {
	Domain    string     `json:"domain"`
	Listeners []Listener `json:"listeners"`
	Names     []Entry    `json:"names"`
	URL       string     `json:"url,omitempty"` // of the list, for a browser of this machine; empty if it reaches none
}
