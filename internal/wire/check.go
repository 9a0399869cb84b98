// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"net/netip"
	"unicode/utf8"

	"github.com/fairlead/fairlead/internal/port"
)

// Check reports whether c is one message within the limits. ReadControl has
// checked what it returns.
func (c Control) Check() error {
	n := 0
	for _, set := range [...]bool{
		c.Snapshot != nil, c.Change != nil, c.Ack != nil, c.Outcomes != nil, c.Resync != nil, c.Unpublished != nil,
	} {
		if set {
			n++
		}
	}
	if n != 1 {
		return malformed("%d messages, want 1", n)
	}
	switch {
	case c.Snapshot != nil:
		return c.Snapshot.check()
	case c.Change != nil:
		if c.Change.Generation <= c.Change.Base {
			return malformed("change: generation %d is not after base %d", c.Change.Generation, c.Change.Base)
		}
		if err := checkAll(c.Change.Put, Publication.Check); err != nil {
			return err
		}
		return checkAll(c.Change.Removed, checkKey)
	case c.Ack != nil:
		return checkAll(c.Ack.Outcomes, Outcome.check)
	case c.Outcomes != nil:
		return checkAll(c.Outcomes.Outcomes, Outcome.check)
	case c.Unpublished != nil:
		return c.Unpublished.check()
	default:
		return checkText("resync: reason", c.Resync.Reason, MaxReason)
	}
}

func (s *Snapshot) check() error {
	if s.Epoch == "" {
		return malformed("snapshot: no epoch")
	}
	if err := checkText("snapshot: epoch", s.Epoch, MaxWord); err != nil {
		return err
	}
	if len(s.Incomplete) > MaxIncomplete {
		return malformed("snapshot: %d sources, at most %d", len(s.Incomplete), MaxIncomplete)
	}
	for _, name := range s.Incomplete {
		if err := checkText("snapshot: source", name, MaxWord); err != nil {
			return err
		}
	}
	return checkAll(s.Publications, Publication.Check)
}

func (u *Unpublished) check() error {
	if u.Omitted < 0 {
		return malformed("%d ports omitted", u.Omitted)
	}
	if err := checkAll(u.Put, UnpublishedPort.check); err != nil {
		return err
	}
	if u.Unread != nil {
		if err := checkAll(*u.Unread, Unread.check); err != nil {
			return err
		}
	}
	return checkAll(u.Removed, checkKey)
}

func (p UnpublishedPort) check() error {
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

func (r Unread) check() error { return checkTexts("", r.Where, r.Rule, r.Reason) }

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

func (o Outcome) check() error {
	if err := checkKey(o.Key); err != nil {
		return err
	}
	if o.State < port.Denied || o.State > port.Active {
		return malformed("%s: no state", o.Key)
	}
	if o.HostAddress != (netip.AddrPort{}) {
		if err := checkAddr(o.HostAddress.Addr()); err != nil {
			return err
		}
	}
	if o.State == port.Active && o.HostAddress.Port() == 0 {
		return malformed("%s: active without a host address", o.Key)
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
