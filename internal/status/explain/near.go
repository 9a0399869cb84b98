// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"fmt"
	"slices"
	"strings"

	"github.com/fairlead/fairlead/internal/port"
)

// finding is something related to the port, with what to do about it.
type finding struct {
	verdict    port.Verdict
	text, next string
}

// related returns what is related to the port, the most likely cause first. Without a
// publication the first one is the answer. With one, other network namespaces do not
// matter.
func (f *Facts) related(published bool) []finding {
	var list []finding
	for _, l := range f.OtherPorts {
		if f.Query.asks(l.Protocol) {
			list = append(list, finding{
				port.VerdictHostPort, fmt.Sprintf("%d/%s is the host port of port %s of guest %s", f.Query.Port, l.Protocol, l.Slot, l.Guest),
				"run: fairlead explain " + l.Slot.String(),
			})
		}
	}
	for _, s := range f.Sockets {
		// With a publication, a listener of the sink or a client is normal.
		if f.Query.asks(s.Protocol) && !(published && (s.Own || s.Kind == Client)) {
			list = append(list, f.here(s))
		}
	}
	list = append(list, f.unread("about", false)...)
	for _, s := range f.Elsewhere {
		if !published && f.Query.asks(s.Protocol) && s.Kind == Listening {
			list = append(list, elsewhere(s))
		}
	}
	list = append(list, f.otherProtocol(published)...)
	for _, s := range f.Sources {
		switch {
		case s.State == "stale" && f.Host && f.shows(s.Name): // with the publication
		case s.State == "stale" && f.Host:
			list = append(list, finding{port.VerdictStale, fmt.Sprintf("guest %s is not connected: %s", s.title(), s.Error), s.Next})
		case s.State == "stale":
			list = append(list, finding{
				port.VerdictStale,
				fmt.Sprintf("source %s fails, so its ports may be out of date: %s", s.Name, s.Error),
				"fix that first: `fairlead doctor` says how",
			})
		case s.State == "starting":
			list = append(list, finding{
				port.VerdictStarting, fmt.Sprintf("source %s is starting", s.Name), "ask again in a moment",
			})
		}
	}
	return list
}

// shows reports whether one of the publications that the query asks for is of a guest.
func (f *Facts) shows(guest string) bool {
	return slices.ContainsFunc(f.Publications, func(p Publication) bool { return f.Query.asks(p.Protocol) && p.Guest == guest })
}

// unread returns findings about unsupported NAT rules.
func (f *Facts) unread(about string, unsure bool) (list []finding) {
	for _, u := range f.Unread {
		if u.Unsure != unsure {
			continue
		}
		rule := "a NAT rule"
		if u.Guest != "" {
			rule += " of guest " + u.Guest
		}
		list = append(list, finding{
			port.VerdictNAT,
			fmt.Sprintf("%s %s port %d is not supported, so it is not published: %s: %s (%s)", rule, about, f.Query.Port, u.Where, u.Rule, u.Reason),
			"write the rule in a supported form, or publish the port with the engine that owns it",
		})
	}
	return list
}

// unsure returns rules that may be about the port, but more likely are not.
func (f *Facts) unsure() []finding { return f.unread("that may be about", true) }

// here judges an unpublished socket of the watched namespace.
func (f *Facts) here(s Socket) finding {
	what := fmt.Sprintf("%s %s%s", s.Protocol, s.Address, by(s))
	switch {
	case s.Own:
		return finding{
			port.VerdictOwn, what + " is fairlead's own socket, which is never published",
			"use another port, or move fairlead's own (--metrics-addr, --web-addr or the sink's address)",
		}
	case s.Kind == Client:
		return finding{
			port.VerdictClient, what + " is a UDP client's socket: it has a peer, or a port chosen by the kernel",
			"if it is a server, make it bind its port explicitly and not call connect()",
		}
	}
	i := slices.IndexFunc(f.Sources, func(s Source) bool { return s.Name == "socket" })
	switch {
	case i < 0:
		return finding{
			port.VerdictDisabled, fmt.Sprintf("%s is %s, but the socket source is disabled", what, s.Kind),
			"add socket to the agent's sources (--source, or source: in its configuration)",
		}
	case f.Sources[i].State == "starting":
		return finding{
			port.VerdictStarting, fmt.Sprintf("%s is %s, but the agent is still starting", what, s.Kind), "ask again in a moment",
		}
	case f.Sources[i].State == "stale":
		return finding{
			port.VerdictStale, fmt.Sprintf("%s is %s, but the socket source fails: %s", what, s.Kind, f.Sources[i].Error),
			"fix that first: `fairlead doctor` says how",
		}
	}
	return finding{
		port.VerdictUnseen, fmt.Sprintf("%s is %s, but the agent has not reported it yet", what, s.Kind),
		"ask again in a moment; if nothing changes, run `fairlead doctor`",
	}
}

func by(s Socket) string {
	switch {
	case s.Container.Kind != port.OwnerUnknown && s.Process != "":
		return " of " + Owner(s.Container) + ", " + s.Process + ","
	case s.Container.Kind != port.OwnerUnknown:
		return " of " + Owner(s.Container) + ","
	case s.Process != "":
		return " of " + s.Process
	}
	return ""
}

func elsewhere(s Socket) finding {
	n := finding{verdict: port.VerdictNetNS}
	n.text = fmt.Sprintf("%s %s%s is %s in another network namespace (%s), whose ports are not published",
		s.Protocol, s.Address, by(s), s.Kind, s.NetNS)
	switch {
	case s.Container.Kind == port.OwnerContainer:
		n.next = fmt.Sprintf("publish the port when the container is started (-p %d:%d), or run it with --network host",
			s.Address.Port(), s.Address.Port())
	case s.Address.Addr().IsLoopback():
		n.next = "start it in the agent's network namespace: on its own loopback nothing else can reach it"
	default:
		n.next = "start it in the agent's network namespace, or forward the port to it with a NAT rule"
	}
	return n
}

// otherProtocol returns what exists for the other protocol.
func (f *Facts) otherProtocol(published bool) []finding {
	var list []finding
	say := func(p port.Protocol, what string) {
		n := finding{
			port.VerdictProtocol, fmt.Sprintf("%s is %s, not %s", what, strings.ToUpper(p.String()), strings.ToUpper(f.Query.Protocol.String())),
			fmt.Sprintf("run: fairlead explain %d/%s", f.Query.Port, p),
		}
		if !slices.Contains(list, n) {
			list = append(list, n)
		}
	}
	for _, p := range f.Publications {
		if !f.Query.asks(p.Protocol) {
			owner := ""
			if p.Owner.Kind != port.OwnerUnknown {
				owner = " of " + Owner(p.Owner)
			}
			say(p.Protocol, p.AddrPort().String()+owner)
		}
	}
	sockets := f.Sockets
	if !published && len(list) == 0 {
		sockets = slices.Concat(sockets, f.Elsewhere)
	}
	for _, s := range sockets {
		if !f.Query.asks(s.Protocol) && s.Kind == Listening {
			what := s.Address.String() + strings.TrimSuffix(by(s), ",")
			if s.NetNS != "" && s.NetNS != f.NetNS {
				what += " (in " + s.NetNS + ")"
			}
			say(s.Protocol, what)
		}
	}
	return list
}

// nothing is the answer if nothing related was found.
func (f *Facts) nothing() finding {
	what := fmt.Sprintf("port %d", f.Query.Port)
	if f.Query.Protocol != 0 {
		what = port.Slot{Protocol: f.Query.Protocol, Port: f.Query.Port}.String()
	}
	if f.Host {
		return finding{
			port.VerdictNothingHere, "no guest publishes " + what,
			fmt.Sprintf("run in the guest: fairlead explain %d", f.Query.Port),
		}
	}
	n := finding{
		port.VerdictNothingHere, fmt.Sprintf("nothing in the guest serves %s: no socket, NAT rule, engine or Service has it", what),
		"start the server; it is published the moment it listens",
	}
	if len(f.Similar) > 0 {
		var slots []string
		for _, s := range f.Similar {
			slots = append(slots, s.String())
		}
		n.next = fmt.Sprintf("did you mean %s? Otherwise start the server; it is published the moment it listens", strings.Join(slots, " or "))
	}
	return n
}
