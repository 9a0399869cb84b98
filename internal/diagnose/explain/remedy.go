// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/fairlead/fairlead/internal/claims"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/rules"
)

// target is what a run-time rule is about, and the command that adds or removes it.
type target struct {
	slot   port.Slot
	demand port.Demand
	owner  string // of a rule that pauses
	guest  string // empty for all
}

// targetOf returns the target of a run-time rule.
func targetOf(r *rules.Rule) target {
	t := target{demand: r.Match.Demand, owner: r.Match.Name, guest: r.Match.Guest}
	if len(r.Match.Ports) > 0 {
		t.slot = port.Slot{Protocol: r.Match.Protocol, Port: r.Match.Ports[0].First}
	}
	return t
}

// subject returns "8080/tcp" or "db:5432/tcp".
func (t target) subject() string {
	if !t.demand.IsZero() {
		return t.demand.String()
	}
	return t.slot.String()
}

// name is how the rule that a command makes for t is called behind its first word.
func (t target) name() string {
	s := t.subject()
	switch {
	case t.owner != "":
		s = "owner " + t.owner
	case t.slot.Port == 0:
		s = "all"
	}
	if t.guest != "" {
		s += " of guest " + t.guest
	}
	return s
}

// args is t as arguments of a command, with flags behind the subject.
func (t target) args(flags ...string) string {
	list := []string{t.subject()}
	switch {
	case t.owner != "":
		list = []string{"--owner " + quoteArg(t.owner)}
	case t.slot.Port == 0:
		list = []string{"--all"}
	}
	list = append(list, flags...)
	if t.guest != "" {
		list = append(list, "--guest "+quoteArg(t.guest))
	}
	return strings.Join(list, " ")
}

// quoteArg returns s as one word of a shell.
func quoteArg(s string) string {
	if s != "" && !strings.ContainsFunc(s, func(r rune) bool { return r <= ' ' || strings.ContainsRune("\"'`$\\*?[]{}()<>|&;!#~", r) }) {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}

// undo returns the command that undoes a run-time rule, unless it was written by hand.
func undo(r *rules.Rule) (command string, ok bool) {
	word, _, _ := strings.Cut(r.Name, " ")
	commands := map[string]string{"deny": "allow", "pause": "forward resume", "forward": "forward rm", "allow": "forward rm"}
	t := targetOf(r)
	if commands[word] == "" || r.Name != word+" "+t.name() {
		return "", false
	}
	return "fairlead " + commands[word] + " " + t.args(), true
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
	t, added, byHand := f.targetFor(p)
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
	var flags []string
	if first := f.matching(p); len(first) > 0 {
		if a := first[0].HostAddress; a != rules.Asked() {
			flags = append(flags, "--bind "+a.String())
		}
	}
	s := give + strings.Join(remove, "") + "`fairlead forward add " + t.args(append([]string{fmt.Sprintf("--to %d", to)}, flags...)...) + "`"
	if f.Host {
		next := []string{"--on-conflict next"}
		if at != p.Port {
			next = append([]string{fmt.Sprintf("--to %d", at)}, next...)
		}
		s += ", or the next free one: `fairlead forward add " + t.args(append(next, flags...)...) + "`"
	}
	return s
}

// targetFor returns for what a forward must be added so that it decides about p, and the
// run-time rules that must be removed before. ByHand is one that would decide all the same.
func (f *Facts) targetFor(p *Publication) (t target, remove []*rules.Rule, byHand *rules.Rule) {
	t.slot = p.Slot()
	for _, o := range p.Origins {
		if d, err := port.ParseDemand(o.ID); o.Source == port.SourceDemand && err == nil && t.demand.IsZero() {
			t.demand = d
		}
	}
	list := f.matching(p)
	if len(list) > 0 {
		if d := list[0].Match.Demand; !d.IsZero() {
			t.demand = d
		}
		if list[0].Match.Guest == p.Guest {
			t.guest = p.Guest
		}
	}
	if f.Host && len(f.Sources) > 1 {
		t.guest = p.Guest
	}
	for i := range f.Runtime {
		r := &f.Runtime[i]
		if n, ok := rank(r); ok && n > t.rank() {
			break // the new one comes before it
		}
		if !slices.Contains(list, r) {
			continue
		}
		o := targetOf(r)
		if _, made := undo(r); !made || o.guest != "" && o.guest != p.Guest {
			return t, nil, r
		}
		if o != t || !strings.HasPrefix(r.Name, "allow ") { // a forward replaces that
			remove = append(remove, r)
		}
	}
	return t, remove, nil
}

// rank is the place of a forward for t among those that were added: what names a container
// or Service comes before what names a port, and one guest before all.
func (t target) rank() int {
	n := 4
	if t.guest != "" {
		n--
	}
	if !t.demand.IsZero() {
		n -= 2
	}
	return n
}

// rank is the place of a rule that was added, false for other rules, which remain where they
// are.
func rank(r *rules.Rule) (n int, ok bool) {
	switch word, _, _ := strings.Cut(r.Name, " "); word {
	case "pause", "deny":
		return 0, true
	case "forward", "allow":
		return targetOf(r).rank(), true
	case "expose":
		return 5, true
	}
	return 0, false
}

// movesHolder reports whether a forward for t moves also the port that has the address.
func (f *Facts) movesHolder(p *Publication, t target, o Outcome) bool {
	return slices.ContainsFunc(f.Publications, func(q Publication) bool {
		return q.Key != p.Key && q.Slot() == p.Slot() && q.Guest == p.Guest && (t.demand.IsZero() || q.Demanded(t.demand)) &&
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
