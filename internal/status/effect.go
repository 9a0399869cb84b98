// SPDX-License-Identifier: Apache-2.0

package status

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/fairlead/fairlead/internal/forwards"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/rules"
	"github.com/fairlead/fairlead/internal/yamltree"
)

// guests returns those of a host, none on an agent.
func (s *Server) guests() []Peer {
	if s.o.Role != "host" {
		return nil
	}
	return s.peers()
}

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

// isPattern reports whether the name of a guest in a rule may stand for several.
func isPattern(name string) bool { return strings.ContainsAny(name, "*?") }

// unknownGuest returns why a rule is about no guest of a host, empty if it is about one or all.
func unknownGuest(pattern string, guests []Peer) string {
	if pattern == "" || guests == nil || slices.ContainsFunc(guests, func(p Peer) bool { return rules.Glob(pattern, p.id()) }) {
		return ""
	}
	if id := guestID(pattern, guests); id != pattern {
		return fmt.Sprintf("rules do not know a guest by the name that it reports, %q: want %s", pattern, id)
	}
	var known []string
	names := GuestNames(guests)
	for _, p := range guests {
		name := names[p.id()]
		if isPattern(pattern) && name != p.id() {
			name = p.id() + " (shown as " + name + ")" // patterns are not about names that guests report
		}
		known = append(known, name)
	}
	if isPattern(pattern) {
		return fmt.Sprintf("no guest matches %q: there is %s", pattern, strings.Join(known, ", "))
	}
	return fmt.Sprintf("no guest is called %q%s: want %s", pattern, yamltree.Suggest(pattern, known), yamltree.OneOf(known))
}

// ofGuest has a request name its guest as rules do. It refuses what would add a rule about a
// guest that a host does not have; what was added for one that it had can be undone.
func (s *Server) ofGuest(q forwards.Request) (forwards.Request, error) {
	guests := s.guests()
	if q.Guest == "" || guests == nil {
		return q, nil
	}
	q.Guest = guestID(q.Guest, guests)
	why := unknownGuest(q.Guest, guests)
	if why == "" || isPattern(q.Guest) || slices.Contains([]forwards.Op{forwards.Remove, forwards.Resume, forwards.Hide}, q.Op) {
		return q, nil
	}
	list, _ := s.o.Forwards.List() // without it nothing is undone
	if slices.ContainsFunc(list, func(r rules.Rule) bool { undo, ok := forwards.Undo(r); return ok && undo == q }) {
		return q, nil
	}
	return q, errors.New(why)
}

// hint adds to why nothing was undone that the number is that of the host port, if it is.
func (s *Server) hint(q forwards.Request, err error) error {
	if !slices.Contains([]forwards.Op{forwards.Remove, forwards.Resume, forwards.Hide}, q.Op) {
		return err
	}
	if text := hostPortHint(matchOf(q), "", s.o.Provider.List().Publications); text != "" {
		return fmt.Errorf("%w; %s", err, text)
	}
	return err
}

// named reports whether a rule is about the row.
func (p Publication) named(m *rules.Match) bool {
	if p.Waits != "" {
		return false
	}
	about := port.Publication{
		Key: p.Key(), DualStack: p.DualStack,
		Owner: port.Owner{Kind: p.Owner.Kind, Name: p.Owner.Name, Namespace: p.Owner.Namespace, Labels: p.Owner.Labels},
	}
	for _, o := range p.Origins {
		about.Origins = append(about.Origins, port.OriginInfo{Origin: port.Origin{Source: o.Source}})
	}
	for _, d := range p.Demands {
		about.Origins = append(about.Origins, port.OriginInfo{Origin: port.Origin{Source: port.SourceDemand, ID: d}})
	}
	return m.Matches(p.Guest, &about)
}

// namedBy returns the rows that a rule is about. What a guest publishes again is in the list as
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
			published[id{p.Guest, p.Key()}] = published[id{p.Guest, p.Key()}] || !p.Unpublished
		}
	}
	return slices.DeleteFunc(named, func(p Publication) bool { return p.Unpublished && published[id{p.Guest, p.Key()}] })
}

// describeRule describes a rule and the ports that it is about.
func describeRule(r rules.Rule, ports []Publication) ForwardRule {
	f := ForwardRule{
		Name: r.Name, Action: "allow", HostPort: r.HostPort.String(), HostAddress: r.HostAddress.String(), Guest: r.Match.Guest,
		HostAddresses: []netip.AddrPort{}, Demand: r.Match.Demand.String(),
	}
	if q, ok := forwards.Undo(r); ok {
		f.Undo = &q
	}
	named := namedBy(&r.Match, ports)
	f.Ports = len(named)
	switch {
	case r.Deny:
		f.Action, f.State = "deny", port.Denied.String()
		return f
	case r.Exposes():
		f.Action, f.Until = "expose", r.Until
	}
	if len(r.Match.Ports) == 0 {
		return f
	}
	f.State, f.Reason = port.Pending.String(), notServed
	var best port.State
	for i, p := range named {
		if i == 0 || p.State > best {
			best = p.State
			f.State, f.Reason = p.shownState(), p.Reason
			if r.Exposes() {
				f.State, f.Reason = exposure(p)
			}
		}
		for _, a := range p.HostAddresses {
			if !slices.Contains(f.HostAddresses, a) {
				f.HostAddresses = append(f.HostAddresses, a)
			}
		}
	}
	f.Note = joined(leftOf(named), narrower(r, named))
	return f
}

// joined puts notes into one; empty ones are left out.
func joined(notes ...string) string {
	return strings.Join(slices.DeleteFunc(notes, func(s string) bool { return s == "" }), "; ")
}

// narrower says that a port is open at narrower addresses than a rule asks for, if one is.
func narrower(r rules.Rule, named []Publication) string {
	for _, p := range named {
		if !r.Exposes() && p.narrower(r.HostAddress) {
			return fmt.Sprintf("narrower than --bind %s, because neither the configuration nor the agent opens more; on the host `%s` does for a time",
				r.HostAddress, forwards.Request{Op: forwards.Expose, Protocol: p.Protocol, Port: p.Port, Guest: r.Match.Guest}.Command())
		}
	}
	return ""
}

// narrower reports whether the port is open, and at narrower addresses than at.
func (p Publication) narrower(at rules.HostAddress) bool {
	return p.State == port.Active && !at.OpenAt(p.HostAddresses)
}

// leftOf returns which of the ports that a rule allows are closed all the same.
func leftOf(named []Publication) string {
	var closed []Publication
	for _, p := range named {
		if p.State == port.Denied {
			closed = append(closed, p)
		}
	}
	switch {
	case len(closed) == 0:
		return ""
	case len(closed) < len(named):
		return fmt.Sprintf("%d of %d ports remain closed: %s%s", len(closed), len(named), closed[0].Reason, closed[0].inGuest())
	case closed[0].Unpublished:
		return "the guest does not publish it: change that there"
	}
	return ""
}

// inGuest says that the guest decides about a row, if it does.
func (p Publication) inGuest() string {
	if !p.Unpublished {
		return ""
	}
	return " in guest " + cmp.Or(p.GuestName, p.Guest)
}

// exposure returns the state and reason of a port that is to be exposed: those of the
// addresses that other machines reach, if one of these cannot be opened.
func exposure(p Publication) (state, reason string) {
	for _, o := range p.Outcomes {
		at, err := netip.ParseAddrPort(o.HostAddress)
		if err == nil && !at.Addr().IsLoopback() && o.State != port.Active {
			return o.State.String(), o.Reason
		}
	}
	return p.shownState(), p.Reason
}

// notServed is the reason of a rule that allows a port that does not exist yet.
const notServed = "nothing in the guest serves it yet"

// notFoundYet is the reason of a rule that asks for a port by name, before anybody looked.
const notFoundYet = "it is being looked for"

// explainRule says why a rule names no port.
func (s *Server) explainRule(f *ForwardRule, r rules.Rule, ports []Publication, guests []Peer) {
	if f.Ports > 0 || !r.Deny && f.State == "" {
		return
	}
	f.Reason = s.whyNone(r, ports, guests)
	if r.Deny {
		f.Reason = "closes nothing now: " + f.Reason
	}
}

// whyNone returns why a rule names no port.
func (s *Server) whyNone(r rules.Rule, ports []Publication, guests []Peer) string {
	m := r.Match
	if !m.Demand.IsZero() {
		why := ""
		if s.o.Demands != nil {
			why = s.o.Demands(m.Guest, m.Demand)
		}
		if why == "" && !r.Deny {
			why = notFoundYet
		}
		return cmp.Or(why, notServed)
	}
	if why := cmp.Or(unknownGuest(m.Guest, guests), notConnected(m.Guest, guests)); why != "" {
		return why
	}
	if len(m.Ports) == 0 {
		return "no port matches yet"
	}
	command, _, _ := strings.Cut(r.Name, " ")
	if hint := hostPortHint(m, command, ports); hint != "" {
		return notServed + "; " + hint
	}
	return notServed
}

// notConnected says that none of the guests that a rule is about is connected.
func notConnected(pattern string, guests []Peer) string {
	var away []string
	names := GuestNames(guests)
	for _, p := range guests {
		switch {
		case pattern != "" && !rules.Glob(pattern, p.id()):
		case p.State != PeerAway:
			return ""
		default:
			away = append(away, names[p.id()])
		}
	}
	switch len(away) {
	case 0:
		return ""
	case 1:
		return "guest " + away[0] + " is not connected"
	}
	return "guests " + strings.Join(away, ", ") + " are not connected"
}

// hostPortHint says that the port of a rule is the host port of another one, if it is, and the
// command for that: deny, pause, allow or expose. Another one is left out.
func hostPortHint(m rules.Match, command string, ports []Publication) string {
	if len(m.Ports) != 1 || m.Ports[0].First != m.Ports[0].Last || !m.Demand.IsZero() {
		return ""
	}
	n := m.Ports[0].First
	for _, p := range ports {
		of := m
		of.Ports = nil
		if !p.named(&of) || !slices.ContainsFunc(p.HostAddresses, func(a netip.AddrPort) bool { return a.Port() == n }) {
			continue
		}
		slot := p.Key().Slot()
		if p.Port == n {
			return "" // the rule is about it
		}
		text := fmt.Sprintf("%d is the host port of guest port %s", n, slot)
		if op := forwards.Op(command); slices.Contains([]forwards.Op{forwards.Deny, forwards.Pause, forwards.Allow, forwards.Expose}, op) {
			text += ": `" + forwards.Request{Op: op, Protocol: p.Protocol, Port: p.Port, Guest: m.Guest}.Command() + "`"
		}
		return text
	}
	return ""
}

// setExposedEnds sets which commands end the exposures of rows.
func (s *Server) setExposedEnds(ports []Publication) {
	if s.o.Forwards == nil || !slices.ContainsFunc(ports, Publication.exposed) {
		return
	}
	list, _ := s.o.Forwards.List() // what cannot be read no command changes
	for i := range ports {
		ports[i].ExposedEnd = exposedEnd(list, ports[i:i+1])
	}
}

// exposedEnd returns the commands that end the exposures of rows, in one line. It is empty if a
// rule exposes one that was written by hand.
func exposedEnd(list []rules.Rule, ports []Publication) string {
	var ends []string
	for _, r := range list {
		if !r.Exposes() || !slices.ContainsFunc(ports, func(p Publication) bool { return p.exposed() && p.named(&r.Match) }) {
			continue
		}
		undo, ok := forwards.Undo(r)
		if !ok {
			return ""
		}
		ends = append(ends, undo.Command())
	}
	return strings.Join(ends, "; ")
}

// exposures returns until when the ports that a rule names are exposed, by whatever rule, and
// what ends that; zero and empty if none is. See exposedEnd.
func (s *Server) exposures(ports []Publication, match rules.Match) (until time.Time, end string) {
	named := slices.DeleteFunc(slices.Clone(ports), func(p Publication) bool { return !p.exposed() || !match.Names(p.Guest, p.Protocol, p.Port) })
	for _, p := range named {
		if p.ExposedUntil.After(until) {
			until = p.ExposedUntil
		}
	}
	list, _ := s.o.Forwards.List() // what cannot be read no command changes
	return until, exposedEnd(list, named)
}

// leftClosed says what remains closed after a change that is to open a port and added no rule:
// other rules close it, too.
func (s *Server) leftClosed(q forwards.Request, done forwards.Result) string {
	if !slices.Contains([]forwards.Op{forwards.Allow, forwards.Resume}, q.Op) || len(done.Added) > 0 {
		return ""
	}
	r := rules.Rule{Match: matchOf(q)}
	f := describeRule(r, s.o.Provider.List().Publications)
	if f.Ports == 0 || f.State != port.Denied.String() {
		return f.Note
	}
	return joined(fmt.Sprintf("%d/%s remains closed: %s", r.Match.Ports[0].First, r.Match.Protocol, f.Reason), f.Note)
}
