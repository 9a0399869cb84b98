// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"fmt"
	"slices"
	"strings"

	"github.com/fairlead/fairlead/internal/port"
)

// finding is something near, with what to do about it.
type finding struct {
	verdict    Verdict
	text, next string
}

// nearly returns what nearly matched, the most telling first. Where there is no
// publication, the first one is the answer; where there is one, what other
// network namespaces have is of no interest.
func (f *Facts) nearly(published bool) []finding {
	var list []finding
	for _, s := range f.Sockets {
		// Beside a publication, a listener of the sink's own or a client is usual.
		if f.Query.asks(s.Protocol) && !(published && (s.Own || s.Kind == Client)) {
			list = append(list, f.here(s))
		}
	}
	list = append(list, f.unread("a NAT rule about port %d", false)...)
	for _, s := range f.Elsewhere {
		if !published && f.Query.asks(s.Protocol) && s.Kind == Listening {
			list = append(list, elsewhere(s))
		}
	}
	list = append(list, f.otherProtocol(published)...)
	for _, s := range f.Sources {
		switch {
		case s.State == "stale" && f.Host:
			list = append(list, finding{
				VerdictStale, fmt.Sprintf("guest %s is not connected: %s", s.Name, s.Error),
				"start `fairlead agent` in that guest; its log says why it does not answer",
			})
		case s.State == "stale":
			list = append(list, finding{
				VerdictStale,
				fmt.Sprintf("source %s cannot look, so what it last saw may be old: %s", s.Name, s.Error),
				"put that right first: `fairlead doctor` says how",
			})
		case s.State == "starting":
			list = append(list, finding{
				VerdictStarting, fmt.Sprintf("source %s has not yet seen everything", s.Name), "ask again in a moment",
			})
		}
	}
	return list
}

// unread tells of NAT rules that are not understood.
func (f *Facts) unread(what string, unsure bool) (list []finding) {
	for _, u := range f.Unread {
		if u.Unsure != unsure {
			continue
		}
		list = append(list, finding{
			VerdictNAT,
			fmt.Sprintf(what+" is not understood, so it is not published: %s: %s (%s)", f.Query.Port, u.Where, u.Rule, u.Reason),
			"write the rule in one of the forms of docs/nat.md, or publish the port by the engine that owns it",
		})
	}
	return list
}

// unsure is what could be about the port, and more likely is not.
func (f *Facts) unsure() []finding { return f.unread("a NAT rule that may be about port %d", true) }

// here judges a socket of the watched namespace that is not published.
func (f *Facts) here(s Socket) finding {
	what := fmt.Sprintf("%s %s%s", s.Protocol, s.Address, by(s))
	switch {
	case s.Own:
		return finding{
			VerdictOwn, what + " is fairlead's own socket, which is never published",
			"use another port, or move fairlead's (--metrics-addr, or the sink's address)",
		}
	case s.Kind == Client:
		return finding{
			VerdictClient, what + " is a UDP client's socket: it has a peer, or a port that the kernel chose, so it serves nobody",
			"if it is a server, let it bind its port explicitly and not connect() it",
		}
	}
	i := slices.IndexFunc(f.Sources, func(s Source) bool { return s.Name == "socket" })
	switch {
	case i < 0:
		return finding{
			VerdictDisabled, fmt.Sprintf("%s is %s, but the agent does not look at sockets", what, s.Kind),
			"add socket to the agent's sources (--source, or source: in its configuration)",
		}
	case f.Sources[i].State == "starting":
		return finding{
			VerdictStarting, fmt.Sprintf("%s is %s, and the agent has not yet seen everything", what, s.Kind), "ask again in a moment",
		}
	case f.Sources[i].State == "stale":
		return finding{
			VerdictStale, fmt.Sprintf("%s is %s, but the agent cannot look: %s", what, s.Kind, f.Sources[i].Error),
			"put that right first: `fairlead doctor` says how",
		}
	}
	return finding{
		VerdictUnseen, fmt.Sprintf("%s is %s, and the agent has not told of it", what, s.Kind),
		"ask again in a moment; if it stays so, run `fairlead doctor`",
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
	n := finding{verdict: VerdictNetNS}
	n.text = fmt.Sprintf("%s %s%s is %s in another network namespace (%s), which this guest's ports do not include",
		s.Protocol, s.Address, by(s), s.Kind, s.NetNS)
	switch {
	case s.Container.Kind == port.OwnerContainer:
		n.next = fmt.Sprintf("publish the port when the container is started (-p %d:%d), or run it with --network host",
			s.Address.Port(), s.Address.Port())
	case s.Address.Addr().IsLoopback():
		n.next = "let it listen in the agent's network namespace; inside its own it serves that namespace's loopback alone"
	default:
		n.next = "start it in the agent's network namespace, or forward the port into its own with a NAT rule (docs/nat.md)"
	}
	return n
}

// otherProtocol finds what is there for the protocol that was not asked for.
func (f *Facts) otherProtocol(published bool) []finding {
	var list []finding
	say := func(p port.Protocol, what string) {
		n := finding{
			VerdictProtocol, fmt.Sprintf("%s is %s, not %s", what, strings.ToUpper(p.String()), strings.ToUpper(f.Query.Protocol.String())),
			fmt.Sprintf("ask for it: fairlead explain %d/%s", f.Query.Port, p),
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

// nothing is the answer where nothing is near.
func (f *Facts) nothing() finding {
	what := fmt.Sprintf("port %d", f.Query.Port)
	if f.Query.Protocol != 0 {
		what = port.Slot{Protocol: f.Query.Protocol, Port: f.Query.Port}.String()
	}
	if f.Host {
		return finding{
			VerdictNothingHere, "no guest publishes " + what,
			fmt.Sprintf("ask in the guest: fairlead explain %d", f.Query.Port),
		}
	}
	n := finding{
		VerdictNothingHere, fmt.Sprintf("nothing in the guest serves %s: no socket, no NAT rule, no engine and no Service has it", what),
		"start the server; it is published the moment it listens",
	}
	if len(f.Similar) > 0 {
		var slots []string
		for _, s := range f.Similar {
			slots = append(slots, s.String())
		}
		n.next = fmt.Sprintf("did you mean %s? Else start the server: it is published the moment it listens", strings.Join(slots, " or "))
	}
	return n
}
