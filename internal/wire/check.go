// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"net/netip"
	"unicode/utf8"

	"github.com/fairlead/fairlead/internal/port"
)

// Check reports whether a receiver would accept p.
func (p UnpublishedPort) Check() error {
	if err := checkKey(p.Key); err != nil {
		return err
	}
	if len(p.Owner.Labels) > 0 {
		return malformed("%s: labels of a port that is not published", p.Key)
	}
	if err := checkOwner(p.Key, p.Owner); err != nil {
		return err
	}
	if err := checkDemands(p.Key, p.Demands); err != nil {
		return err
	}
	if err := p.Reason.checkDecided(); err != nil {
		return err
	}
	if p.Rule.OnHost {
		return malformed("%s: a guest knows no %s", p.Key, p.Rule)
	}
	return checkTexts(p.Source, p.Rule.Name)
}

// Check reports whether a receiver would accept r.
func (r Unread) Check() error { return checkTexts("", r.Where, r.Rule, r.Reason) }

func checkTexts(source string, texts ...string) error {
	for _, s := range texts {
		if err := checkText("unpublished: text", s, MaxReason); err != nil {
			return err
		}
	}
	return checkText("source", source, MaxWord)
}

func checkAll[T any](items []T, check func(T) error) error {
	if len(items) > MaxListItems {
		return malformed("%d items, at most %d", len(items), MaxListItems)
	}
	for _, v := range items {
		if err := check(v); err != nil {
			return err
		}
	}
	return nil
}

// Check reports whether a receiver would accept p.
func (p Publication) Check() error {
	if err := checkKey(p.Key); err != nil {
		return err
	}
	if len(p.Host) > MaxHosts {
		return malformed("%s: %d host addresses, at most %d", p.Key, len(p.Host), MaxHosts)
	}
	for _, h := range p.Host { // port 0 asks for any free port
		if err := checkAddr(h.Addr()); err != nil {
			return err
		}
	}
	l := p.Wish()
	if err := checkTexts(p.Source, l.Rule); err != nil {
		return err
	}
	if err := checkText("alias", l.Alias, MaxWord); err != nil {
		return err
	}
	if err := checkOwner(p.Key, p.Owner); err != nil {
		return err
	}
	if err := checkDemands(p.Key, p.Demands); err != nil {
		return err
	}
	return checkOthers(p.Key, p.Others)
}

func checkDemands(k port.Key, demands []string) error {
	if len(demands) > MaxDemandsOfOne {
		return malformed("%s: %d demands, at most %d", k, len(demands), MaxDemandsOfOne)
	}
	for _, s := range demands {
		if err := checkText("demand", s, MaxReason); err != nil {
			return err
		}
	}
	return nil
}

func checkOthers(k port.Key, others []port.Owner) error {
	if len(others) > MaxOthers {
		return malformed("%s: %d other owners, at most %d", k, len(others), MaxOthers)
	}
	total := 0
	for _, o := range others {
		if err := checkOwner(k, o); err != nil {
			return err
		}
		total += otherSize + ownerText(o)
	}
	if total > MaxOtherBytes {
		return malformed("%s: %d bytes of other owners, at most %d", k, total, MaxOtherBytes)
	}
	return nil
}

func checkOwner(key port.Key, o port.Owner) error {
	var held port.Held
	if o.Held != nil {
		held = *o.Held
	}
	for _, t := range [...]struct{ name, text string }{
		{"owner name", o.Name}, {"owner id", o.ID}, {"owner namespace", o.Namespace}, {"owner cluster", o.Cluster},
		{"engine of the owner", held.Engine}, {"user of the owner", held.User}, {"process of the owner", held.Process},
	} {
		if err := checkText(t.name, t.text, MaxName); err != nil {
			return err
		}
	}
	if len(o.Labels) > MaxLabels {
		return malformed("%s: %d labels, at most %d", key, len(o.Labels), MaxLabels)
	}
	total := 0
	for k, v := range o.Labels {
		total += len(k) + len(v)
		if len(k) > MaxLabelKey || len(v) > MaxLabelValue || total > MaxLabelBytes {
			return malformed("%s: labels too long", key)
		}
		if !utf8.ValidString(k) || !utf8.ValidString(v) {
			return malformed("%s: a label is not UTF-8", key)
		}
	}
	if len(o.LeftOut()) > MaxLabels {
		return malformed("%s: %d labels left out, at most %d are named", key, len(o.LeftOut()), MaxLabels)
	}
	total = 0
	for _, k := range o.LeftOut() {
		total += len(k)
		if total > MaxLeftOut || !fit(k, "") {
			return malformed("%s: the key of a label that was left out is too long or not UTF-8", key)
		}
	}
	return nil
}

// Check reports whether a receiver would accept a.
func (a Answer) Check() error {
	if err := checkKey(a.Key); err != nil {
		return err
	}
	if n := len(a.Outcomes); n == 0 || n > MaxOutcomes {
		return malformed("%s: %d outcomes, want 1 to %d", a.Key, n, MaxOutcomes)
	}
	for _, o := range a.Outcomes {
		if err := o.check(a.Key); err != nil {
			return err
		}
	}
	return nil
}

func (o Outcome) check(k port.Key) error {
	if o.State < port.Denied || o.State > port.Active {
		return malformed("%s: no state", k)
	}
	if o.HostAddress != (netip.AddrPort{}) {
		if err := checkAddr(o.HostAddress.Addr()); err != nil {
			return err
		}
	}
	if o.State == port.Active && o.HostAddress.Port() == 0 {
		return malformed("%s: active without a host address", k)
	}
	return o.Reason.check()
}

func (q FlowRequest) check() error {
	if err := checkKey(q.Key); err != nil {
		return err
	}
	for _, a := range [...]netip.AddrPort{q.Peer, q.At} {
		if a == (netip.AddrPort{}) {
			continue
		}
		if err := checkAddr(a.Addr()); err != nil {
			return err
		}
	}
	return nil
}

func (p FlowReply) check() error {
	switch p.Status {
	case FlowOK, FlowRefused, FlowForbidden, FlowUnreachable:
		return checkText("reason", p.Reason, MaxReason)
	}
	return malformed("unknown status %q", string(p.Status))
}

// CheckKey reports whether a receiver would accept k.
func CheckKey(k port.Key) error { return checkKey(k) }

func checkKey(k port.Key) error {
	if k.Protocol != port.TCP && k.Protocol != port.UDP {
		return malformed("protocol %d, want tcp or udp", uint8(k.Protocol))
	}
	if k.Port == 0 {
		return malformed("port 0")
	}
	return checkAddr(k.Address)
}

func checkAddr(a netip.Addr) error {
	switch {
	case !a.IsValid():
		return malformed("no address")
	case a.Is4In6():
		return malformed("address %s is mapped, want IPv4", a.WithZone(""))
	case len(a.Zone()) > MaxZone:
		return malformed("zone of %d bytes, at most %d", len(a.Zone()), MaxZone)
	}
	for _, c := range []byte(a.Zone()) {
		if c <= ' ' || c > '~' {
			return malformed("zone %q has a character that no interface has", a.Zone())
		}
	}
	return nil
}

func checkText(what, s string, limit int) error {
	if len(s) > limit {
		return malformed("%s of %d bytes, at most %d", what, len(s), limit)
	}
	if !utf8.ValidString(s) {
		return malformed("%s is not UTF-8", what)
	}
	return nil
}
