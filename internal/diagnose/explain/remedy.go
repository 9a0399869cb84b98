// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/fairlead/fairlead/internal/claims"
	"github.com/fairlead/fairlead/internal/forwards"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/rules"
)

// undo returns the command that undoes a run-time rule, unless it was written by hand.
func undo(r *rules.Rule) (command string, ok bool) {
	q, ok := forwards.Undo(*r)
	return q.Command(), ok
}

// matching returns the run-time rules that decide about p, or would if those before them
// were removed, in their order.
func (f *Facts) matching(p *Publication) (list []*rules.Rule) {
	asked := []netip.AddrPort{netip.AddrPortFrom(netip.IPv6Loopback(), p.Port)}
	for i := range f.Runtime {
		set, err := rules.Empty(rules.Asked()).WithRuntime(f.Runtime[i : i+1])
		if err == nil && rules.ByRuntime(set.Host(p.Guest, p.Publication, asked).Rule) {
			list = append(list, &f.Runtime[i])
		}
	}
	return list
}

// undoRuntime is what undoes the run-time rule that a text names, which closes p.
func (f *Facts) undoRuntime(p *Publication, text string) string {
	for _, r := range f.matching(p) {
		if command, ok := undo(r); ok && r.Deny && strings.Contains(text, "("+r.Name+")") {
			return "undo it: `" + command + "`"
		}
	}
	return fmt.Sprintf("change the rule in %s; `fairlead forward ls` lists the rules there", cmp.Or(f.ForwardsFile, "the file of run-time rules (forwardsFile)"))
}

// allowPort is how to allow a port that is denied by default, and that no rule denies.
func (f *Facts) allowPort(p *Publication) string {
	rule := fmt.Sprintf("add a rule for the port to %s: {match: {protocol: %s, ports: %d}, action: allow}", f.rulesFile(), p.Protocol, p.Port)
	if f.ForwardsFile == "" && !f.Host {
		return rule
	}
	return fmt.Sprintf("run `fairlead allow %s`%s, or %s", p.Slot(), f.inGuest(), rule)
}

// freeHolder is how to free the address of a conflict, followed by "or".
func freeHolder(o Outcome) string {
	if claims.IsHeld(o.Reason) {
		return "stop what has it, or "
	}
	return fmt.Sprintf("stop the program that uses %s on the host (fairlead takes the port over within seconds), or ", o.HostAddress)
}

// relocate is how to give p another host port in place of the one at which it lost.
func (f *Facts) relocate(p *Publication, o Outcome) string {
	at := cmp.Or(o.HostAddress.Port(), p.Port)
	if !f.Host && len(p.Decision.Host) > 0 && !slices.ContainsFunc(p.Decision.Host, func(a netip.AddrPort) bool { return a.Port() == at }) {
		return fmt.Sprintf("give this port another one by the rules of the host, which chose %d: on the host, `fairlead explain %s` says how", at, p.Slot())
	}
	to := f.freePort(p.Protocol, at)
	t, added, byHand := f.forwardFor(p)
	if byHand != nil {
		return fmt.Sprintf("give this port another one: hostPort of the rule %q in %s", byHand.Name, f.ForwardsFile)
	}
	const give = "give this port another one: "
	var remove []string
	for _, r := range added {
		if command, ok := undo(r); ok {
			remove = append(remove, "`"+command+"`, then ")
		}
	}
	if f.ForwardsFile == "" || f.movesHolder(p, t, o) {
		return give + strings.Join(remove, "") + f.portRule(p, to)
	}
	// What the first of these rules says beside the port remains.
	if first := f.matching(p); len(first) > 0 {
		if a := first[0].HostAddress; a != rules.Asked() {
			t.Bind = a.String()
		}
	}
	moved := t
	moved.To = to
	s := give + strings.Join(remove, "") + "`" + moved.Command() + "`"
	if f.Host {
		if at != p.Port {
			t.To = at
		}
		t.OnConflict = port.OnConflictNext.String()
		s += ", or the next free one: `" + t.Command() + "`"
	}
	return s
}

// forwardFor returns the forward that must be added so that it decides about p, without what it
// says of the host, and the run-time rules that must be removed before. ByHand is one that would
// decide all the same.
func (f *Facts) forwardFor(p *Publication) (t forwards.Request, remove []*rules.Rule, byHand *rules.Rule) {
	t.Op = forwards.Add
	for _, o := range p.Origins {
		if d, err := port.ParseDemand(o.ID); o.Source == port.SourceDemand && err == nil && t.Demand == "" {
			t.Demand = d.String()
		}
	}
	list := f.matching(p)
	if len(list) > 0 {
		if d := list[0].Match.Demand; !d.IsZero() {
			t.Demand = d.String()
		}
		if list[0].Match.Guest == p.Guest {
			t.Guest = p.Guest
		}
	}
	if f.Host && len(f.Sources) > 1 {
		t.Guest = p.Guest
	}
	if t.Demand == "" {
		t.Protocol, t.Port = p.Protocol, p.Port
	}
	for i := range f.Runtime {
		r := &f.Runtime[i]
		if n, ok := forwards.Rank(*r); ok && n > t.ForwardRank() {
			break // the new one comes before it
		}
		if !slices.Contains(list, r) {
			continue
		}
		o, made := forwards.Undo(*r)
		if !made || o.Guest != "" && o.Guest != p.Guest {
			return t, nil, r
		}
		o.Op = t.Op
		if o != t || !strings.HasPrefix(r.Name, "allow ") { // a forward replaces that
			remove = append(remove, r)
		}
	}
	return t, remove, nil
}

// movesHolder reports whether a forward for t moves also the port that has the address.
func (f *Facts) movesHolder(p *Publication, t forwards.Request, o Outcome) bool {
	demand, err := port.ParseDemand(t.Demand)
	return slices.ContainsFunc(f.Publications, func(q Publication) bool {
		return q.Key != p.Key && q.Slot() == p.Slot() && q.Guest == p.Guest && (err != nil || q.Demanded(demand)) &&
			slices.ContainsFunc(q.Outcomes, func(a Outcome) bool { return a.State == port.Active && claims.Overlap(a.HostAddress, o.HostAddress) })
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
	for _, r := range f.Runtime {
		for _, p := range r.Match.Ports {
			n, _ := r.HostPort.Of(p.First)
			taken[int(n)] = true
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
