// SPDX-License-Identifier: Apache-2.0

// Package policy decides which container may ask for which port.
package policy

import (
	"errors"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/rules"
	"github.com/fairlead/fairlead/internal/yamltree"
)

// Entry allows ports to the containers that it matches.
type Entry struct {
	Match      rules.Match       // of the container alone: name, namespace, labels
	GuestPorts []rules.PortRange // of the guest's loopback that it may reach
	HostPorts  []rules.PortRange // at which the host may reach it
}

// Policy is a list of entries. What no entry allows is denied.
type Policy []Entry

// Parse reads a policy. The error joins the first mistake of each entry.
func Parse(n yamltree.Node) (Policy, error) {
	if n.IsNull() { // "allow:" with all entries commented out
		return nil, nil
	}
	if !n.IsList() {
		return nil, n.Errorf(`want a list of entries ("- match: {name: web}")`)
	}
	var p Policy
	var errs []error
	for _, item := range n.List() {
		e, err := parseEntry(item)
		p, errs = append(p, e), append(errs, err)
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return p, nil
}

func parseEntry(n yamltree.Node) (e Entry, err error) {
	fields, err := n.Map("match", "guestPorts", "hostPorts")
	if err != nil {
		return e, err
	}
	matched := false
	for _, f := range fields {
		switch f.Key {
		case "match":
			e.Match, err = rules.ParseOwner(f.Node)
			matched = e.Match.Name != "" || e.Match.Namespace != "" || len(e.Match.Labels) > 0
		case "guestPorts":
			e.GuestPorts, err = rules.ParsePortList(f.Node)
		case "hostPorts":
			e.HostPorts, err = rules.ParsePortList(f.Node)
		}
		if err != nil {
			return e, err
		}
	}
	switch {
	case !matched:
		return e, n.Errorf(`no container is named: want match with name, namespace or labels (name: "*" for all)`)
	case len(e.GuestPorts) == 0 && len(e.HostPorts) == 0:
		return e, n.Errorf("no port is allowed: want guestPorts, hostPorts or both")
	}
	return e, nil
}

// Names reports whether an entry matches the container.
func (p Policy) Names(container port.Owner) bool {
	for i := range p {
		if p[i].Match.MatchesOwner(container) {
			return true
		}
	}
	return false
}

// Guest reports whether the container may reach a port of the guest's loopback.
func (p Policy) Guest(container port.Owner, number uint16) bool {
	return p.allows(container, number, func(e *Entry) []rules.PortRange { return e.GuestPorts })
}

// Host reports whether the container may be reached at a port of the host.
func (p Policy) Host(container port.Owner, number uint16) bool {
	return p.allows(container, number, func(e *Entry) []rules.PortRange { return e.HostPorts })
}

func (p Policy) allows(container port.Owner, number uint16, ports func(*Entry) []rules.PortRange) bool {
	for i := range p {
		if rules.InRanges(ports(&p[i]), number) && p[i].Match.MatchesOwner(container) {
			return true
		}
	}
	return false
}
