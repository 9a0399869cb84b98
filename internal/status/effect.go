// SPDX-License-Identifier: Apache-2.0

package status

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/fairlead/fairlead/internal/config/forwards"
	"github.com/fairlead/fairlead/internal/config/rules"
	"github.com/fairlead/fairlead/internal/config/words"
	"github.com/fairlead/fairlead/internal/port"
)

// guestID returns what rules call the guest that is shown by a name. Another name is its own.
func guestID(name string, guests []Peer) string {
	if slices.ContainsFunc(guests, func(p Peer) bool { return p.id() == name }) {
		return name
	}
	for id, shown := range GuestNames(guests) {
		if shown == name {
			return id
		}
	}
	return name
}

// ofGuest has a request name its guest as rules do. It refuses what would add a rule about a
// guest that a host does not have; what was added for one that it had can be undone.
func (s *Server) ofGuest(q forwards.Request) (forwards.Request, error) {
	if q.Guest == "" || s.o.Role != "host" {
		return q, nil
	}
	guests := s.peers()
	q.Guest = guestID(q.Guest, guests)
	if strings.ContainsAny(q.Guest, "*?") || slices.ContainsFunc(guests, func(p Peer) bool { return p.id() == q.Guest }) ||
		slices.Contains([]forwards.Op{forwards.Remove, forwards.Hide}, q.Op) {
		return q, nil
	}
	if slices.ContainsFunc(s.o.Forwards.List(), func(e forwards.Entry) bool { return e.Undo() == q }) {
		return q, nil
	}
	var known []string
	names := GuestNames(guests)
	for _, p := range guests {
		known = append(known, names[p.id()])
	}
	return q, fmt.Errorf("no guest is called %q%s: want %s", q.Guest, words.Suggest(q.Guest, known), words.OneOf(known))
}

// named reports whether a request is about the row.
func (p Publication) named(m *rules.Match) bool {
	if p.Waits != "" {
		return false
	}
	about := port.Publication{Fact: p.Fact}
	for _, o := range p.Origins {
		about.Origins = append(about.Origins, port.OriginInfo{Origin: port.Origin{Source: o.Source}})
	}
	return m.Matches(p.Guest, &about)
}

// namedBy returns the rows that a request is about. What a guest publishes again is in the list as
// unpublished for a moment more, and is left out as such.
func namedBy(m *rules.Match, ports []Publication) (named []Publication) {
	type id struct {
		guest string
		key   port.Key
	}
	published := make(map[id]bool)
	for _, p := range ports {
		if p.named(m) {
			named = append(named, p)
			published[id{p.Guest, p.Key}] = published[id{p.Guest, p.Key}] || !p.Unpublished
		}
	}
	return slices.DeleteFunc(named, func(p Publication) bool { return p.Unpublished && published[id{p.Guest, p.Key}] })
}

// requested describes a request and the ports that it is about.
func requested(e forwards.Entry, ports []Publication) Requested {
	f := Requested{Request: e.Request, Undo: e.Undo(), Until: e.Until, HostAddresses: []netip.AddrPort{}}
	match := e.Match()
	named := namedBy(&match, ports)
	f.Ports = len(named)
	if e.Op == forwards.Deny {
		f.State = port.Denied.String()
		if len(named) == 0 {
			f.because(port.Because(port.ClosesNothing))
		}
		return f
	}
	f.State = port.Pending.String()
	f.because(port.Because(port.NotServedYet))
	var best port.State
	for i, p := range named {
		if i == 0 || p.State > best {
			best = p.State
			f.State, f.Reason, f.Code = p.shownState(), p.Reason+p.inGuest(), p.Code
			if e.Op == forwards.Expose {
				f.State, f.Reason, f.Code = exposure(p)
			}
		}
		for _, a := range p.HostAddresses {
			if !slices.Contains(f.HostAddresses, a) {
				f.HostAddresses = append(f.HostAddresses, a)
			}
		}
		if at := e.HostAddress(); e.Op != forwards.Expose && p.narrower(at) {
			f.Note = fmt.Sprintf("narrower than --bind %s, as neither the configuration nor the agent opens more", at)
		}
	}
	return f
}

// narrower reports whether the port is open, and at narrower addresses than at.
func (p Publication) narrower(at rules.HostAddress) bool {
	return p.State == port.Active && !at.OpenAt(p.HostAddresses)
}

// inGuest says that the guest decides about a row, if it does.
func (p Publication) inGuest() string {
	if !p.Unpublished || p.Code == port.Unstated {
		return ""
	}
	return " in guest " + cmp.Or(p.GuestName, p.Guest)
}

// exposure returns the state and reason, with its code, of a port that is to be exposed: those of the
// addresses that other machines reach, if one of these cannot be opened.
func exposure(p Publication) (state, reason string, code port.Code) {
	for _, o := range p.Outcomes {
		at, err := netip.ParseAddrPort(o.HostAddress)
		if err == nil && !at.Addr().IsLoopback() && o.State != port.Active {
			return o.State.String(), o.Reason, o.Code
		}
	}
	return p.shownState(), p.Reason, p.Code
}

// because sets the reason of the state.
func (f *Requested) because(r port.Reason) { f.Reason, f.Code = r.String(), r.Code() }

// explainDemand says why a port that is asked for by name is not there.
func (s *Server) explainDemand(f *Requested) {
	d := f.Request.Match().Demand
	if f.Ports > 0 || f.Request.Op == forwards.Deny || d.IsZero() {
		return
	}
	if s.o.Demands != nil {
		f.because(cmp.Or(s.o.Demands(d), port.Because(port.LookedFor)))
	} else { // on a host
		f.because(port.Because(port.GuestLacks, d.String(), forwards.Request{Op: forwards.Forward, Demand: d.String()}.Command()))
	}
}

// exposedUntil returns until when the ports that are selected are exposed, by whatever request;
// zero if none is.
func exposedUntil(ports []Publication, match rules.Match) (until time.Time) {
	for _, p := range ports {
		if match.Names(p.Guest, p.Protocol, p.Port) && p.ExposedUntil.After(until) {
			until = p.ExposedUntil
		}
	}
	return until
}
