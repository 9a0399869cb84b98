// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/fairlead/fairlead/internal/config/forwards"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/claims"
)

// undoRuntime is how to undo a run-time rule. Where says at which system, if not here.
func undoRuntime(where string) string {
	return fmt.Sprintf("undo it%s by `fairlead allow` or `fairlead forward rm`; `fairlead forward ls` lists the rules", where)
}

// allowPort is how to allow a port that is denied by default, and that no rule denies.
func (f *Facts) allowPort(p *Publication) string {
	rule := fmt.Sprintf("add a rule for the port to %s: {match: {protocol: %s, ports: %d}, action: allow}", f.rulesFile(), p.Protocol, p.Port)
	if f.ForwardsFile == "" && !f.Host {
		return rule
	}
	return fmt.Sprintf("run `fairlead allow %s`%s, or %s", p.Slot(), f.inGuest(), rule)
}

// advise fills the places in what to do about a reason of p: of an outcome, or of
// its decision, with the zero Outcome.
func (f *Facts) advise(p *Publication, r port.Reason, o port.SinkOutcome) string {
	var places []string
	text := r.Advice()
	for place, with := range map[string]func() string{
		"{change}":   func() string { return f.change(p, r.Rule()) },
		"{allow}":    func() string { return f.allowPort(p) },
		"{rule}":     func() string { return p.Decision.Rule.String() },
		"{address}":  func() string { return o.HostAddress.String() },
		"{relocate}": func() string { return f.relocate(p, o) },
	} {
		if strings.Contains(text, place) {
			places = append(places, place, with())
		}
	}
	return strings.NewReplacer(places...).Replace(text)
}

// change is how to change what a rule denies.
func (f *Facts) change(p *Publication, rule port.RuleRef) string {
	switch {
	case rule.Kind.Runtime() && rule.OnHost && !f.Host:
		return undoRuntime(" on the host")
	case rule.Kind.Runtime() && !rule.OnHost:
		return undoRuntime(f.inGuest())
	case rule.Kind.Runtime():
		return undoRuntime("")
	case rule.Kind == port.RuleLabel:
		return "change the label, or " + f.allowPort(p)
	case rule.OnHost || rule.Kind == port.NoRule:
		return "change the rules of the host peer (`fairlead host`), in its configuration"
	}
	return fmt.Sprintf("change %s in %s, or add a rule that allows the port before it (`fairlead explain --rules %s`%s shows which rule decides)",
		rule, f.rulesFile(), p.Slot(), f.inGuest())
}

// relocate is how to give p another host port in place of the one at which it lost.
func (f *Facts) relocate(p *Publication, o port.SinkOutcome) string {
	at := cmp.Or(o.HostAddress.Port(), p.Port)
	if !f.Host && len(p.Decision.Host) > 0 && !slices.ContainsFunc(p.Decision.Host, func(a netip.AddrPort) bool { return a.Port() == at }) {
		return fmt.Sprintf("give this port another one by the rules of the host, which chose %d: on the host, `fairlead explain %s` says how", at, p.Slot())
	}
	const give = "give this port another one: "
	t, to := f.forwardFor(p), f.freePort(p.Protocol, at)
	if f.ForwardsFile == "" || f.movesHolder(p, t, o) {
		return give + f.portRule(p, to)
	}
	moved := t
	moved.To = to
	s := give + "`" + moved.Command() + "`"
	if f.Host {
		which, c := "the next", port.OnConflictNext
		for r := range o.Reason.All() {
			if r.Code() == port.NoneFree { // the rule looked for that
				which, c = "any", port.OnConflictAny
			}
		}
		t.OnConflict = c.String()
		s += ", or " + which + " free one: `" + t.Command() + "`"
	}
	return s
}

// forwardFor returns a forward of p, without what it says of the host.
func (f *Facts) forwardFor(p *Publication) forwards.Request {
	t := forwards.Request{Op: forwards.Forward}
	if f.Host && len(f.Sources) > 1 {
		t.Guest = p.Guest
	}
	if list := p.Demands(); len(list) > 0 {
		t.Demand = list[0]
		return t
	}
	t.Protocol, t.Port = p.Protocol, p.Port
	return t
}

// movesHolder reports whether a forward for t moves also the port that has the address.
func (f *Facts) movesHolder(p *Publication, t forwards.Request, o port.SinkOutcome) bool {
	demand, err := port.ParseDemand(t.Demand)
	return slices.ContainsFunc(f.Publications, func(q Publication) bool {
		return q.Key != p.Key && q.Slot() == p.Slot() && q.Guest == p.Guest && (err != nil || q.Demanded(demand)) &&
			slices.ContainsFunc(q.Outcomes, func(a port.SinkOutcome) bool {
				return a.State == port.Active && claims.Overlap(a.HostAddress, o.HostAddress)
			})
	})
}

// portRule is a rule of the configuration that gives p, and no other, a host port.
func (f *Facts) portRule(p *Publication, to uint16) string {
	match := fmt.Sprintf("protocol: %s, ports: %d, address: %q", p.Protocol, p.Port, p.Address.WithZone(""))
	file := f.rulesFile()
	if f.Host {
		file = "the configuration of `fairlead host`"
		if len(f.Sources) > 1 {
			match += fmt.Sprintf(", guest: %q", p.Guest)
		}
	}
	return fmt.Sprintf("add a rule for it to %s, before the others: {match: {%s}, action: allow, hostPort: %d}", file, match, to)
}

// freePort returns a host port that is valid and that nothing of fairlead has or wants.
func (f *Facts) freePort(protocol port.Protocol, at uint16) uint16 {
	taken := make(map[int]bool)
	for _, s := range f.HostPorts {
		if s.Protocol == protocol {
			taken[int(s.Port)] = true
		}
	}
	for _, step := range []int{10000, -10000, 1, -1} {
		for n := int(at) + step; n >= 1024 && n <= 65535; n += step {
			if !taken[n] {
				return uint16(n)
			}
		}
	}
	return at // all are taken
}
