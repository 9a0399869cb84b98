// SPDX-License-Identifier: Apache-2.0

// Package policy decides which container may ask for which port.
package policy

import (
	"errors"

	"github.com/fairlead/fairlead/internal/config/rules"
	"github.com/fairlead/fairlead/internal/port"
)

// Entry allows ports to the containers that it matches: name, namespace and labels count.
type Entry struct {
	Match      rules.Match      `key:"match" only:"name,namespace,labels" keys:"some" need:"no container is named: want match with name, namespace or labels (name: \"*\" for all)" help:"the containers that are meant"`
	GuestPorts rules.PortRanges `key:"guestPorts" either:"ports" types:"integer,string" pattern:"^[0-9]+(-[0-9]+)?( *, *[0-9]+(-[0-9]+)?)*$" min:"1" max:"65535" some:"want at least one" help:"ports of the guest's loopback that they may reach"`
	HostPorts  rules.PortRanges `key:"hostPorts" either:"ports" types:"integer,string" pattern:"^[0-9]+(-[0-9]+)?( *, *[0-9]+(-[0-9]+)?)*$" min:"1" max:"65535" some:"want at least one" help:"ports at which the host may reach them"`
}

// Policy is a list of entries. What no entry allows is denied.
type Policy []Entry

// Check returns what no single field shows to be wrong.
func (e Entry) Check() (key string, err error) {
	switch {
	case e.Match.Name == "" && e.Match.Namespace == "" && len(e.Match.Labels) == 0:
		return "match", errors.New(`no container is named: want name, namespace or labels (name: "*" for all)`)
	case len(e.GuestPorts) == 0 && len(e.HostPorts) == 0:
		return "", errors.New("no port is allowed: want guestPorts, hostPorts or both")
	}
	return "", nil
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
	return p.allows(container, number, func(e *Entry) rules.PortRanges { return e.GuestPorts })
}

// Host reports whether the container may be reached at a port of the host.
func (p Policy) Host(container port.Owner, number uint16) bool {
	return p.allows(container, number, func(e *Entry) rules.PortRanges { return e.HostPorts })
}

func (p Policy) allows(container port.Owner, number uint16, ports func(*Entry) rules.PortRanges) bool {
	for i := range p {
		if rules.InRanges(ports(&p[i]), number) && p[i].Match.MatchesOwner(container) {
			return true
		}
	}
	return false
}
