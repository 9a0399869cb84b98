// SPDX-License-Identifier: Apache-2.0

package rules

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/fairlead/fairlead/internal/port"
)

// Set is an ordered list of rules, compiled. It never changes and may be used
// from any goroutine.
type Set struct {
	expose  HostAddress
	rules   []rule
	runtime []rule // evaluated after these
	labels  bool   // labels of owners are obeyed, after these
}

// rule is a Rule with what each decision needs made ready.
type rule struct {
	Rule
	labels []label
	ref    port.RuleRef
}

type label struct{ key, glob string }

// New compiles rules. Expose is where a guest wildcard appears: on the agent
// Loopback or All (Asked means Loopback); on the host also Asked, which leaves
// it to the agent, or one address. An error names the rule and the field.
func New(expose HostAddress, list []Rule) (*Set, error) {
	compiled, err := compile(list)
	if err != nil {
		return nil, err
	}
	return &Set{expose: expose, rules: compiled}, nil
}

// compile makes rules ready.
func compile(list []Rule) ([]rule, error) {
	compiled := make([]rule, len(list))
	for i, r := range list {
		ref := port.RuleRef{Kind: cmp.Or(r.Kind, port.RuleConfigured), Number: uint32(i + 1), Name: r.Name}
		if field, err := r.Check(); err != nil {
			return nil, fmt.Errorf("%s: %s: %w", ref, field, err)
		}
		r.Match.Ports = slices.Clone(r.Match.Ports)
		r.Match.Addresses = slices.Clone(r.Match.Addresses)
		r.Match.Sources = slices.Clone(r.Match.Sources)
		r.Match.Owners = slices.Clone(r.Match.Owners)
		c := rule{Rule: r, ref: ref}
		for _, k := range slices.Sorted(maps.Keys(r.Match.Labels)) {
			c.labels = append(c.labels, label{k, r.Match.Labels[k]})
		}
		compiled[i] = c
	}
	return compiled, nil
}

// Empty returns the set without rules; see [New] for expose.
func Empty(expose HostAddress) *Set { return &Set{expose: expose} }

// Len is the number of rules, without the defaults.
func (s *Set) Len() int { return len(s.rules) }

// Decide returns whether p, which has no decision yet, may appear on the agent's
// behalf, and where. The first rule that matches decides. Without one, the
// well-known UDP ports, the ports of engines themselves and what every origin
// withholds are denied and all else is allowed; to allow these, a rule must name
// their ports. Labels of the owner, if the set obeys them, decide after the rules. A wildcard appears on the
// host's loopback unless the set exposes all; any other guest address appears
// there whatever the set exposes, unless a rule names a host address.
//
// While p's owner is pending, rules that name an owner may come to match. If that
// would change the decision, p is denied as pending, and so is one that may be a port
// of an engine itself. Of p's other owners, a rule that denies one who serves it denies p,
// unless a Service's or a container's p leads to containers or Services and the rule tells
// kinds of owners apart only; where engines claim p for several owners, p is denied as pending
// unless all decisions are the same.
func (s *Set) Decide(p port.Publication) port.Ruling {
	d, _, _ := s.decide(&p)
	return d
}

// decide is Decide, with the rule that decides, nil if none does, and why a default would deny
// p.
func (s *Set) decide(p *port.Publication) (d port.Ruling, winner *rule, by port.Reason) {
	d, winner, by = s.decideOne(p)
	for _, o := range p.Others {
		q := *p
		q.Owner, q.OwnerPending = o.Owner, false
		e, r, _ := s.decideOne(&q)
		switch {
		case o.Rival && (e.Allow != d.Allow || !slices.Equal(e.Host, d.Host)):
			if r == nil {
				e.Rule, r = d.Rule, winner
			}
			return port.Ruling{Decision: port.Decision{Rule: e.Rule, Reason: port.Because(port.OwnerContested, rivals(p))}}, r, by
		case d.Allow && deniesOther(p, o, e, r):
			return deny(r.ref, port.DeniedOther, describe(o.Owner)), r, by
		}
	}
	return d, winner, by
}

// decideOne is decide for p's own owner.
func (s *Set) decideOne(p *port.Publication) (d port.Ruling, winner *rule, by port.Reason) {
	if p.Owner.Held == nil {
		return s.decideFor(p)
	}
	process, container := asHeld(p)
	if d, winner, by = s.decideFor(&process); !d.Allow {
		return d, winner, by
	}
	if e, r, _ := s.decideFor(&container); r.deniesHeld(e) {
		return e, r, by
	}
	return d, winner, by
}

// asHeld returns p of a container that a user's own engine names: as that of the process that
// holds it, and as the container's. Rules decide about the first, and those that deny and
// name an owner see the second as well.
func asHeld(p *port.Publication) (process, container port.Publication) {
	process, container = *p, *p
	process.Owner = p.Owner.AsProcess()
	container.Owner.Held, container.Owner.Labels = nil, nil
	return process, container
}

// deniesHeld reports whether r denies by e a container that a user's own engine names.
func (r *rule) deniesHeld(e port.Ruling) bool {
	return r != nil && r.Deny && !e.Allow && !e.Pending() && r.Match.namesOwner()
}

// deniesOther reports whether p is denied because r denies by e an owner who serves it, too.
func deniesOther(p *port.Publication, o port.OtherOwner, e port.Ruling, r *rule) bool {
	return !o.Rival && !e.Allow && r != nil && (r.Match.namesOne() || sameTerms(&p.Owner, &o.Owner))
}

// deny is a denial by a rule.
func deny(ref port.RuleRef, code port.Code, args ...string) port.Ruling {
	return port.Ruling{Decision: port.Decision{Rule: ref, Reason: ref.Because(code, args...)}}
}

// sameTerms reports whether a rule that denies another owner for its kind, or because no rule
// allows it, also denies the port. A Service's pods are containers, and so is what a relay
// serves: these have their owner's decision.
func sameTerms(own, other *port.Owner) bool {
	return other.Kind == port.OwnerProcess || own.Kind < port.OwnerService || own.Kind == other.Kind || own.Held != nil || other.Held != nil
}

// rivals names the owners of whom one serves p.
func rivals(p *port.Publication) string {
	var names []string
	if p.Owner.Kind >= port.OwnerService {
		names = append(names, describe(p.Owner))
	}
	for _, o := range p.Others {
		if o.Rival {
			names = append(names, describe(o.Owner))
		}
	}
	return strings.Join(names, " and ")
}

func describe(o port.Owner) string {
	if o.Kind == port.OwnerUnknown {
		return "an unknown process"
	}
	if o.Namespace != "" {
		return o.Kind.String() + " " + o.Namespace + "/" + o.Name
	}
	return o.Kind.String() + " " + o.Name
}

// decideFor is decideOne without regard to [port.Owner.Held].
func (s *Set) decideFor(p *port.Publication) (d port.Ruling, winner *rule, by port.Reason) {
	by = held(p)
	winner, maybe := first(s.rules, "", p, !by.IsZero())
	switch {
	case winner != nil:
		d = winner.decide(winner.ref, s.agentAddresses(p))
	case !by.IsZero():
		d = port.Ruling{Decision: port.Decision{Rule: defaultOf(by), Reason: by}}
	default:
		d = port.Ruling{Decision: port.Decision{Allow: true, Rule: defaultAllow, Host: s.agentAddresses(p)}}
	}
	if by.IsZero() && (winner == nil || !winner.decides(true)) && mayBeHeld(p) {
		by = port.Because(port.OwnerAwaited)
		return port.Ruling{Decision: port.Decision{Rule: port.RuleRef{Kind: port.RuleEngine}, Reason: by}}, nil, by
	}
	for _, r := range maybe {
		if m := r.decide(r.ref, s.agentAddresses(p)); m.Allow != d.Allow || !slices.Equal(m.Host, d.Host) {
			return r.undecided(r.ref, p), r, by
		}
	}
	if len(s.runtime) > 0 {
		within := d.Host
		if !d.Allow {
			within = s.agentAddresses(p)
		}
		d, winner = s.overlay(side{}, p, d, winner, within)
	}
	if s.labels {
		d, winner = s.obey(p, d, winner)
	}
	return d, winner, by
}

// Host decides on the host, which has the last word: asked is what the agent asks
// for p of a guest. The
// result is never wider than that unless this set, the host user's own, exposes
// more or a rule in it names a host address. The agent has already applied the
// defaults, so none is applied here. While the agent reports p's owner as pending, a
// decision that depends on it is. Where one depends on what the agent left out of the
// owner, p is denied. A rule that denies another owner who serves p denies it as in Decide.
func (s *Set) Host(guest string, p port.Publication, asked []netip.AddrPort) port.Ruling {
	if len(asked) == 0 {
		return port.Ruling{Decision: port.Decision{Rule: hostDefault, Reason: port.Because(port.NothingAsked)}}
	}
	d, _ := s.hostOne(guest, &p, asked)
	if !d.Allow {
		return d
	}
	for _, o := range p.Others {
		q := p
		q.Owner, q.OwnerPending = o.Owner, false
		if e, r := s.hostOne(guest, &q, asked); deniesOther(&p, o, e, r) {
			if lacks := r.lacks(&q.Owner, r.mismatch(&q)); lacks != "" {
				return deny(r.onHost(), port.DeniedOtherCut, describe(o.Owner), lacks)
			}
			return deny(r.onHost(), port.DeniedOther, describe(o.Owner))
		}
	}
	return d
}

// hostOne is Host for p's own owner, with the rule that decides, nil if none does.
func (s *Set) hostOne(guest string, p *port.Publication, asked []netip.AddrPort) (port.Ruling, *rule) {
	if p.Owner.Held == nil {
		return s.decideHost(guest, p, asked)
	}
	process, container := asHeld(p)
	d, winner := s.decideHost(guest, &process, asked)
	if d.Allow {
		if e, r := s.decideHost(guest, &container, asked); r.deniesHeld(e) {
			return e, r
		}
	}
	return d, winner
}

// decideHost is hostOne without regard to [port.Owner.Held].
func (s *Set) decideHost(guest string, p *port.Publication, asked []netip.AddrPort) (port.Ruling, *rule) {
	winner, maybe := first(s.rules, guest, p, false)
	d := port.Ruling{Decision: port.Decision{Allow: true, Rule: hostDefault, Host: s.hostAddresses(p, asked)}}
	if p.Decision.Yields && (winner == nil || winner.HostPort == HostPort{}) {
		if r, n := s.mayTake(guest, p, asked); r != nil {
			return deny(r.onHost(), port.DeniedHostPort, strconv.Itoa(int(n))), r
		}
	}
	if winner != nil {
		d = winner.decide(winner.onHost(), d.Host)
	}
	for _, r := range maybe {
		if m := r.decide(r.onHost(), s.hostAddresses(p, asked)); m.Allow != d.Allow || !slices.Equal(m.Host, d.Host) {
			return r.undecided(r.onHost(), p), r
		}
	}
	if len(s.runtime) > 0 {
		within := d.Host
		if !d.Allow {
			within = s.hostAddresses(p, asked)
		}
		return s.overlay(side{host: true, guest: guest}, p, d, winner, within)
	}
	return d, winner
}

// first returns the rule of a list that decides, nil if none does, and the rules before
// it that decide if an engine names an owner that they match.
func first(list []rule, guest string, p *port.Publication, isHeld bool) (winner *rule, maybe []*rule) {
	for i := range list {
		r := &list[i]
		f := r.mismatch(p)
		switch {
		case r.Match.Guest != "" && !glob(r.Match.Guest, guest):
		case !r.decides(isHeld):
		case r.depends(p, f):
			maybe = append(maybe, r)
		case f == fieldNone:
			return r, maybe
		}
	}
	return nil, maybe
}

// depends reports whether r matches p or not by an owner that is not known yet, or by
// what was left out of it. f is the first field that does not match.
func (r *rule) depends(p *port.Publication, f field) bool {
	return r.waits(p, f) || r.lacks(&p.Owner, f) != ""
}

// waits reports whether r matches p or not by an owner that is not known yet.
func (r *rule) waits(p *port.Publication, f field) bool {
	return p.OwnerPending && (f == fieldNone || f >= fieldOwner) && r.Match.namesOwner()
}

// lacks names what was left out of an owner on the link by which r may match, empty if it
// matches or does not match by what is there.
func (r *rule) lacks(o *port.Owner, f field) string {
	m := &r.Match
	switch {
	case f != fieldNone && f <= fieldOwner || !o.NameCut && f < fieldLabels:
		return ""
	case slices.ContainsFunc(r.labels, func(l label) bool { return l.excludes(o) }):
		return ""
	case o.NameCut && (m.Name != "" || m.Namespace != ""):
		return "parts of its owner's name"
	case o.LabelsOmitted && f == fieldLabels:
		return "labels of its owner"
	}
	return ""
}

// excludes reports whether the owner does not have l for certain.
func (l label) excludes(o *port.Owner) bool {
	v, ok := o.Labels[l.key]
	return ok && !glob(l.glob, v) || !ok && !o.MayHave(l.key)
}

// undecided is the decision about p where it depends on r: pending if the owner is not
// known yet, and a denial if the guest left something out, which does not come.
func (r *rule) undecided(ref port.RuleRef, p *port.Publication) port.Ruling {
	f := r.mismatch(p)
	if r.waits(p, f) {
		return port.Ruling{Decision: port.Decision{Rule: ref, Reason: port.Because(port.OwnerAwaited)}}
	}
	return deny(ref, port.DeniedCut, r.lacks(&p.Owner, f))
}

// onHost names the rule as a host's.
func (r *rule) onHost() port.RuleRef { return r.ref.Here(true) }

func (m *Match) namesOwner() bool {
	return len(m.Owners) > 0 || m.namesOne()
}

// namesOne reports whether m tells owners of one kind apart.
func (m *Match) namesOne() bool { return m.Name != "" || m.Namespace != "" || len(m.Labels) > 0 }

// decides reports whether a rule that matches also decides. A broad allow ("all
// containers, open to all") does not cover a port that is withheld, which might
// be limited to one client or belong to no server at all.
func (r *rule) decides(isHeld bool) bool {
	return !r.Exposes() && (r.Deny || !isHeld || len(r.Match.Ports) > 0)
}

func (r *rule) decide(ref port.RuleRef, addrs []netip.AddrPort) port.Ruling {
	if r.Deny {
		return deny(ref, port.DeniedByRule)
	}
	for i, a := range addrs {
		n, ok := r.HostPort.of(a.Port())
		if !ok {
			return deny(ref, port.NoHostPort, strconv.Itoa(int(a.Port()))+r.HostPort.String())
		}
		addrs[i] = netip.AddrPortFrom(r.HostAddress.of(a.Addr()), n)
	}
	return port.Ruling{Decision: port.Decision{Allow: true, Rule: ref, Host: unique(addrs)}, OnConflict: r.OnConflict, ProxyProtocol: r.ProxyProtocol}
}

// agentAddresses is what the agent asks for unless a rule has more.
func (s *Set) agentAddresses(p *port.Publication) []netip.AddrPort {
	at := port.Loopback(p.Address)
	if port.IsWildcard(p.Address) {
		at = s.expose.of(at)
	}
	return []netip.AddrPort{netip.AddrPortFrom(at, p.Port)}
}

// hostAddresses is where the host opens p unless a rule has more.
func (s *Set) hostAddresses(p *port.Publication, asked []netip.AddrPort) []netip.AddrPort {
	of := s.expose.of
	if !port.IsWildcard(p.Address) {
		of = s.expose.limit
	}
	addrs := make([]netip.AddrPort, len(asked))
	for i, a := range asked {
		addrs[i] = netip.AddrPortFrom(of(a.Addr().Unmap()), a.Port())
	}
	return unique(addrs)
}

// unique removes repetitions in place. The list is short.
func unique(addrs []netip.AddrPort) []netip.AddrPort {
	out := addrs[:0]
	for _, a := range addrs {
		if !slices.Contains(out, a) {
			out = append(out, a)
		}
	}
	return out
}

// field names what did not match. Those of the owner come last.
type field uint8

const (
	fieldNone field = iota
	fieldProtocol
	fieldPorts
	fieldAddress
	fieldSource
	fieldDemand
	fieldOwner
	fieldName
	fieldNamespace
	fieldLabels
)

// mismatch returns the first field that does not match p.
func (r *rule) mismatch(p *port.Publication) field {
	m := &r.Match
	switch {
	case m.Protocol != 0 && m.Protocol != p.Protocol:
		return fieldProtocol
	case !m.hasPort(p.Port):
		return fieldPorts
	case !m.hasAddress(p):
		return fieldAddress
	case !m.hasSource(p):
		return fieldSource
	case !m.Demand.IsZero() && !p.Demanded(m.Demand):
		return fieldDemand
	case len(m.Owners) > 0 && !slices.Contains(m.Owners, p.Owner.Kind):
		return fieldOwner
	case m.Name != "" && !glob(m.Name, p.Owner.Name):
		return fieldName
	case m.Namespace != "" && !glob(m.Namespace, p.Owner.Namespace):
		return fieldNamespace
	case !r.hasLabels(p):
		return fieldLabels
	}
	return fieldNone
}

// MatchesOwner reports whether the fields about an owner match o; the others do not count.
func (m *Match) MatchesOwner(o port.Owner) bool {
	if len(m.Owners) > 0 && !slices.Contains(m.Owners, o.Kind) ||
		m.Name != "" && !glob(m.Name, o.Name) || m.Namespace != "" && !glob(m.Namespace, o.Namespace) {
		return false
	}
	for k, pattern := range m.Labels {
		if v, ok := o.Labels[k]; !ok || !glob(pattern, v) {
			return false
		}
	}
	return true
}

func (m *Match) hasPort(n uint16) bool { return len(m.Ports) == 0 || InRanges(m.Ports, n) }

// InRanges reports whether one of the ranges has a port.
func InRanges(ranges []PortRange, n uint16) bool {
	return slices.ContainsFunc(ranges, func(r PortRange) bool { return r.First <= n && n <= r.Last })
}

func (m *Match) hasAddress(p *port.Publication) bool {
	return len(m.Addresses) == 0 || m.names(p.Address)
}

func (m *Match) hasSource(p *port.Publication) bool {
	if len(m.Sources) == 0 {
		return true
	}
	for s := range p.Sources() {
		if slices.Contains(m.Sources, port.Family(s)) {
			return true
		}
	}
	return false
}

func (r *rule) hasLabels(p *port.Publication) bool {
	for _, l := range r.labels {
		if v, ok := p.Owner.Labels[l.key]; !ok || !glob(l.glob, v) {
			return false
		}
	}
	return true
}

// Step is how one rule applies to a publication, human-readable.
type Step struct {
	Rule    string `json:"rule"`    // "rule 3 (no-debug)", "default"
	Matched bool   `json:"matched"` // whether all its fields match
	Decides bool   `json:"decides"` // true for exactly one step
	Why     string `json:"why"`     // what did not match, or what it does
}

// Explain returns how each rule and each default applies to p, in their order,
// including those behind the one that decides. The Why of a step quotes what comes
// from the guest.
func (s *Set) Explain(p port.Publication) []Step {
	d, winner, by := s.decide(&p)
	if p.Owner.Held != nil {
		p, _ = asHeld(&p)
	}
	steps := make([]Step, 0, len(s.rules)+len(s.runtime)+3)
	for _, list := range [][]rule{s.rules, s.runtime} {
		for i := range list {
			r := &list[i]
			step := r.explain(&p, !by.IsZero(), r == winner)
			if step.Decides && (!step.Matched || !d.Allow && len(p.Others) > 0) {
				step.Why = d.Reason.String() // for another owner
			}
			steps = append(steps, step)
		}
	}
	if step, ok := s.explainLabels(&p, d, winner); ok {
		steps = append(steps, step)
	}
	if !by.IsZero() {
		steps = append(steps, Step{defaultOf(by).String(), true, winner == nil, by.String()})
	}
	return append(steps, Step{defaultAllow.String(), true, winner == nil && by.IsZero(), "allow"})
}

// ExplainHost is Host, with how each rule applies, as in Explain.
func (s *Set) ExplainHost(guest string, p port.Publication, asked []netip.AddrPort) (port.Ruling, []Step) {
	d := s.Host(guest, p, slices.Clone(asked))
	if p.Owner.Held != nil {
		p, _ = asHeld(&p)
	}
	var steps []Step
	for _, list := range [][]rule{s.rules, s.runtime} {
		for i := range list {
			r := &list[i]
			step := r.explain(&p, false, d.Rule == r.onHost())
			step.Rule = r.onHost().String()
			switch {
			case step.Matched && r.Match.Guest != "" && !glob(r.Match.Guest, guest):
				step.Matched, step.Why = false, fmt.Sprintf("guest is %q, not %q", guest, r.Match.Guest)
			case step.Matched && r.Exposes():
				step.Why = fmt.Sprintf("open to other machines at %s, where a rule allows it, until %s", r.HostAddress, r.Until.UTC().Format("2006-01-02 15:04:05 UTC"))
			case step.Decides && (!step.Matched || !d.Allow && len(p.Others) > 0):
				step.Why = d.Reason.String() // for another owner
			}
			steps = append(steps, step)
		}
	}
	return d, append(steps, Step{hostDefault.String(), true, d.Rule == hostDefault, "allow"})
}

func (r *rule) explain(p *port.Publication, isHeld, decides bool) Step {
	f := r.mismatch(p)
	step := Step{Rule: r.ref.String(), Matched: f == fieldNone, Decides: decides}
	switch {
	case r.waits(p, f):
		step.Matched, step.Why = false, notKnownYet()
	case r.lacks(&p.Owner, f) != "":
		step.Matched, step.Why = false, r.lacks(&p.Owner, f)+leftOut
	case f != fieldNone:
		step.Why = r.why(f, p)
	case !r.Deny && !r.decides(isHeld):
		step.Why = "passed over: to allow what is denied by default, a rule must name its port"
	default:
		step.Why = r.does()
	}
	return step
}

const leftOut = " were left out by the guest, because they are too many or too long"

func notKnownYet() string { return port.Because(port.OwnerAwaited).String() }

// does describes what r decides.
func (r *rule) does() string {
	if r.Deny {
		return "deny"
	}
	s := "allow"
	if r.HostPort != (HostPort{}) {
		s += ", host port " + r.HostPort.String()
	}
	if r.OnConflict != port.OnConflictUnset {
		s += ", on a conflict " + r.OnConflict.String()
	}
	if r.HostAddress != Asked() {
		s += ", host address " + r.HostAddress.String()
	}
	if r.ProxyProtocol != port.ProxyProtocolNone {
		s += ", PROXY protocol " + r.ProxyProtocol.String()
	}
	return s
}

// why describes how the field f of p differs from what the rule wants.
func (r *rule) why(f field, p *port.Publication) string {
	m := &r.Match
	switch f {
	case fieldProtocol:
		return fmt.Sprintf("protocol is %s, not %s", p.Protocol, m.Protocol)
	case fieldPorts:
		return fmt.Sprintf("port is %d, not %s", p.Port, either(m.Ports))
	case fieldAddress:
		return fmt.Sprintf("address is %s, not %s", p.Address, either(m.Addresses))
	case fieldSource:
		return fmt.Sprintf("source is %s, not %s", cmp.Or(strings.Join(slices.Compact(slices.Collect(p.Sources())), " and "), "not known"),
			strings.Join(m.Sources, " or "))
	case fieldDemand:
		return fmt.Sprintf("it is not what %s asks for", m.Demand)
	case fieldOwner:
		return fmt.Sprintf("owner is %s, not %s", p.Owner.Kind, either(m.Owners))
	case fieldName:
		return fmt.Sprintf("name is %q, not %q", p.Owner.Name, m.Name)
	case fieldNamespace:
		return fmt.Sprintf("namespace is %q, not %q", p.Owner.Namespace, m.Namespace)
	}
	for _, l := range r.labels {
		if v, ok := p.Owner.Labels[l.key]; !ok {
			return fmt.Sprintf("label %q is missing", l.key)
		} else if !glob(l.glob, v) {
			return fmt.Sprintf("label %q is %q, not %q", l.key, v, l.glob)
		}
	}
	return ""
}

func either[T fmt.Stringer](list []T) string {
	words := make([]string, len(list))
	for i, v := range list {
		words[i] = v.String()
	}
	return strings.Join(words, " or ")
}

// First returns the first rule that matches p, by its title, without the defaults that Decide
// has. A rule that denies owners matches one that is not known. It does not look at the guest
// and at where NAT rules lead.
func (s *Set) First(p port.Publication) (title string, deny, ok bool) {
	if p.Owner.Held != nil {
		process, container := asHeld(&p)
		if r := s.firstOf(&container); r != nil && r.Deny && r.Match.namesOwner() {
			return r.ref.String(), true, true
		}
		p = process
	}
	if r := s.firstOf(&p); r != nil {
		return r.ref.String(), r.Deny, true
	}
	return "", false, false
}

// firstOf is First without regard to [port.Owner.Held].
func (s *Set) firstOf(p *port.Publication) *rule {
	for i := range s.rules {
		r := &s.rules[i]
		if f := r.mismatch(p); f == fieldNone || f >= fieldOwner && r.Deny && p.Owner.Kind == port.OwnerUnknown {
			return r
		}
	}
	return nil
}
