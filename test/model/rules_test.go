// SPDX-License-Identifier: Apache-2.0

package model

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/config/rules"
	"github.com/fairlead/fairlead/internal/port"
)

// rule is a rule of which the reference knows what it means.
type rule struct {
	port     uint16 // 0 is any
	kind     port.OwnerKind
	name     string // a prefix, then *
	zone     string // the label "zone"
	wildcard bool   // guest wildcards only
	source   string
	deny     bool
	hostPort uint16
	all      bool // on all addresses of the host
}

func (l *rule) namesOne() bool   { return l.name != "" || l.zone != "" }
func (l *rule) namesOwner() bool { return l.namesOne() || l.kind != port.OwnerUnknown }

// ruleset is what agent or host decide by.
type ruleset struct {
	all   bool // expose: all
	asked bool // of the host: what the agent asks for
	rules []rule
}

// agentRules are those between which reloads choose.
var agentRules = []ruleset{
	{},
	{rules: []rule{{name: "secret", deny: true}}},
	{rules: []rule{{zone: "internal", deny: true}}},
	{rules: []rule{{kind: port.OwnerContainer}, {kind: port.OwnerService}, {deny: true}}},
	{all: true, rules: []rule{{kind: port.OwnerProcess, deny: true}, {port: 81, name: "web", hostPort: 8081}}},
	{rules: []rule{{port: 81, deny: true}, {port: 80, name: "secret", deny: true}, {name: "web", all: true}}},
	{rules: []rule{{port: 53}, {wildcard: true, name: "web", hostPort: 0, all: true}, {source: "nat", kind: port.OwnerContainer, name: "secret", deny: true}}},
	{rules: []rule{{name: "web"}, {port: 80}, {deny: true}}},
}

// hostRules are the same of the host.
var hostRules = []ruleset{
	{},
	{asked: true},
	{asked: true, rules: []rule{{name: "secret", deny: true}}},
	{rules: []rule{{kind: port.OwnerContainer, deny: true}}},
	{all: true, rules: []rule{{port: 81, deny: true}}},
	{asked: true, rules: []rule{{port: 80, name: "web", hostPort: 8081}}},
}

// compile returns the rules as the program has them.
func (s ruleset) compile(t *testing.T) *rules.Set {
	t.Helper()
	var list []rules.Rule
	for _, l := range s.rules {
		r := rules.Rule{Deny: l.deny}
		if l.port != 0 {
			r.Match.Ports = []rules.PortRange{{First: l.port, Last: l.port}}
		}
		if l.kind != port.OwnerUnknown {
			r.Match.Owners = []port.OwnerKind{l.kind}
		}
		if l.name != "" {
			r.Match.Name = l.name + "*"
		}
		if l.zone != "" {
			r.Match.Labels = map[string]string{"zone": l.zone}
		}
		if l.source != "" {
			r.Match.Sources = []string{l.source}
		}
		var err error
		if l.wildcard {
			a, e := rules.ParseAddressMatch("wildcard")
			r.Match.Addresses, err = []rules.AddressMatch{a}, e
		}
		if l.hostPort != 0 && err == nil {
			r.HostPort, err = rules.ParseHostPort("8081")
		}
		if err != nil {
			t.Fatal(err)
		}
		if l.all {
			r.HostAddress = rules.All()
		}
		list = append(list, r)
	}
	expose := rules.Loopback()
	if s.all {
		expose = rules.All()
	} else if s.asked {
		expose = rules.Asked()
	}
	set, err := rules.New(expose, list)
	if err != nil {
		t.Fatal(err)
	}
	return set
}

// subject is what rules look at.
type subject struct {
	key     port.Key
	sources []string
	owner   port.Owner
}

// matches reports whether a rule matches, and whether it does but for the owner.
func (l *rule) matches(s subject) (all, butOwner bool) {
	wild := s.key.Address.IsUnspecified()
	butOwner = (l.port == 0 || l.port == s.key.Port) && (!l.wildcard || wild) && (l.source == "" || slices.Contains(s.sources, l.source))
	owner := (l.kind == port.OwnerUnknown || l.kind == s.owner.Kind) && strings.HasPrefix(s.owner.Name, l.name) &&
		(l.zone == "" || s.owner.Labels["zone"] == l.zone)
	return butOwner && owner, butOwner
}

// apply returns what a rule makes of addresses.
func (l *rule) apply(hosts []netip.AddrPort) verdict {
	if l.deny {
		return verdict{}
	}
	v := verdict{allow: true}
	for _, h := range hosts {
		a, n := h.Addr(), h.Port()
		if l.hostPort != 0 {
			n = l.hostPort
		}
		if l.all {
			a = everywhere(a)
		}
		v.host = addNew(v.host, []netip.AddrPort{netip.AddrPortFrom(a, n)})
	}
	return v
}

func everywhere(a netip.Addr) netip.Addr {
	if a.Is4() {
		return netip.IPv4Unspecified()
	}
	return netip.IPv6Unspecified()
}

func (r *reference) subject(p *published, owner port.Owner) (s subject, held bool) {
	s = subject{key: p.key, owner: owner}
	declared := false
	for _, e := range p.entries {
		s.sources = append(s.sources, e.Origin.Source)
		declared = declared || slices.Contains(engines, e.Origin.Source)
	}
	return s, r.allWithheld(p) || !declared && p.key.Protocol == port.UDP && p.key.Port == 53
}

// decide is what the agent decides about a publication of that owner. If the owner is
// pending and a rule that names one could decide otherwise, it is not allowed.
func (s ruleset) decide(r *reference, p *published, owner port.Owner, pending bool) verdict {
	sub, held := r.subject(p, owner)
	hosts := s.asks(p)
	decides := func(l *rule) bool { return l.deny || !held || l.port != 0 }
	v := verdict{allow: !held, host: hosts}
	if held {
		v.host = nil
	}
	var maybe []verdict
	for i := range s.rules {
		l := &s.rules[i]
		all, butOwner := l.matches(sub)
		if !decides(l) {
			continue
		}
		if pending && butOwner && l.namesOwner() {
			maybe = append(maybe, l.apply(hosts))
			continue
		}
		if all {
			v = l.apply(hosts)
			break
		}
	}
	for _, m := range maybe {
		if !m.equal(v) {
			return verdict{}
		}
	}
	return v
}

// denies returns the rule that denies a publication if it were of that owner.
func (s ruleset) denies(r *reference, p *published, owner port.Owner) *rule {
	sub, held := r.subject(p, owner)
	for i := range s.rules {
		l := &s.rules[i]
		if all, _ := l.matches(sub); all && (l.deny || !held || l.port != 0) {
			if l.deny {
				return l
			}
			return nil
		}
	}
	return nil
}

// asks returns the host addresses that the agent asks for without a rule.
func (s ruleset) asks(p *published) []netip.AddrPort {
	a := port.Loopback(p.key.Address)
	if s.all && p.key.Address.IsUnspecified() {
		a = everywhere(a)
	}
	return []netip.AddrPort{netip.AddrPortFrom(a, p.key.Port)}
}

// host is what the host decides about what the agent wants.
func (s ruleset) host(p port.Publication) []netip.AddrPort {
	sub := subject{key: p.Key, owner: p.Owner, sources: []string{p.Origins[0].Source}}
	var hosts []netip.AddrPort
	for _, a := range p.Decision.Host {
		ip := a.Addr()
		switch {
		case s.all && p.Key.Address.IsUnspecified():
			ip = everywhere(ip)
		case !s.all && !s.asked && !ip.IsLoopback():
			ip = port.Loopback(ip)
		}
		hosts = addNew(hosts, []netip.AddrPort{netip.AddrPortFrom(ip, a.Port())})
	}
	pending := p.OwnerPending || slices.ContainsFunc(p.Others, func(o port.OtherOwner) bool { return o.Rival })
	decide := func(owner port.Owner, pending bool) (v verdict, by *rule) {
		sub.owner = owner
		v = verdict{allow: true, host: hosts}
		var maybe []verdict
		for i := range s.rules {
			l := &s.rules[i]
			all, butOwner := l.matches(sub)
			if pending && butOwner && l.namesOwner() {
				maybe = append(maybe, l.apply(hosts))
			} else if all {
				v, by = l.apply(hosts), l
				break
			}
		}
		for _, m := range maybe {
			if !m.equal(v) {
				return verdict{}, by
			}
		}
		return v, by
	}
	v, _ := decide(p.Owner, pending)
	for _, o := range p.Others {
		if o.Rival {
			continue
		}
		if d, by := decide(o.Owner, false); !d.allow && by != nil && (by.namesOne() || sameTerms(p.Owner, o.Owner)) {
			return nil
		}
	}
	return v.host
}
