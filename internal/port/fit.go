// SPDX-License-Identifier: Apache-2.0

package port

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"
)

// Limits of what crosses the link, in bytes where it is text. A sender truncates or leaves out
// what is longer, a receiver refuses it.
const (
	MaxListItems  = 16384    // items that a receiver takes in one list
	MaxName       = 256      // name, ID and namespace of an owner; host names
	MaxWord       = 64       // epoch, source, identity, build version
	MaxReason     = 512      // reasons of outcomes, replies and refusals
	MaxReasons    = 16       // of one outcome or decision; their arguments have at most MaxReason bytes together
	MaxZone       = 32       // zone of a link-local address
	MaxHosts      = 16       // host addresses of one port
	MaxOutcomes   = 32       // of one port: two for each host address that it can ask for
	MaxLabels     = 64       // labels of one owner
	MaxLabelKey   = 256      // key of one label
	MaxLabelValue = 1024     // value of one label
	MaxLabelBytes = 8192     // all keys and values of one owner's labels
	MaxLeftOut    = 2048     // all keys of one owner's labels that are left out
	MaxOthers     = 256      // other owners of one port
	MaxOtherBytes = 96 << 10 // names and labels of all of these, and otherSize for each
	MaxDemands    = 16       // of one port
)

// What some ports have, and how much memory each takes beside its text, in bytes.
const (
	namedSize = 48
	heldSize  = 48
	otherSize = 128
)

// Fit returns what is sent of f to the host. Names longer than MaxName are truncated; labels that
// are not UTF-8 or beyond the limits are left out, in the order of their keys. The owner says so,
// and which if these fit, for the host's rules. Of a port that is not published nothing is sent
// but what people are shown. What no receiver would accept even so (see Check) the caller keeps
// to itself.
func (f Fact) Fit() Fact {
	d := f.Decision
	fit := Fact{Key: f.Key, Owner: f.Owner.fit(), Source: Cut(f.Source, MaxWord), Decision: Decision{Allow: d.Allow}}
	demands := f.Demands()
	fit.SetNamed(Cut(f.Alias(), MaxWord), demands[:min(len(demands), MaxDemands)])
	if !d.Allow || d.Labelled() {
		fit.Decision.Rule = d.Rule
		fit.Decision.Rule.Name = Cut(d.Rule.Name, MaxReason)
	}
	if !d.Allow {
		fit.Decision.Reason = d.Reason.fit()
		fit.Owner.Labels, fit.Owner.LabelsOmitted, fit.Owner.LabelsLeftOut, fit.Owner.Held = nil, false, nil, nil
		return fit
	}
	fit.OwnerPending, fit.Target, fit.Decision.Yields = f.OwnerPending, f.Target, d.Yields
	for _, h := range d.Host {
		fit.Decision.Host = append(fit.Decision.Host, Unmap(h))
	}
	fit.addOthers(f.Others)
	return fit
}

// addOthers adds the owners to whom NAT rules lead, as far as they fit. Where engines
// name several owners, or not all fit, the owner counts as pending: rules that name one
// wait.
func (f *Fact) addOthers(others []OtherOwner) {
	total := 0
	for _, o := range others {
		if o.Rival {
			f.OwnerPending = true
			continue
		}
		fit := o.Owner.fit()
		total += otherSize + fit.textBytes()
		if len(f.Others) == MaxOthers || total > MaxOtherBytes {
			f.OwnerPending = true
			return
		}
		f.Others = append(f.Others, OtherOwner{Owner: fit})
	}
}

func (o Owner) fit() Owner {
	fit := o
	fit.LabelsLeftOut = nil
	fit.Name, fit.ID = Cut(o.Name, MaxName), Cut(o.ID, MaxName)
	fit.Namespace, fit.Cluster = Cut(o.Namespace, MaxName), Cut(o.Cluster, MaxName)
	fit.NameCut = o.NameCut || fit.Name != o.Name || fit.Namespace != o.Namespace
	fit.Labels = fitLabels(o.Labels)
	if len(fit.Labels) < len(o.Labels) && !o.LabelsOmitted {
		fit.LabelsOmitted = true
		if keys := leftOut(o.Labels, fit.Labels); len(keys) > 0 {
			fit.LabelsLeftOut = &keys
		}
	}
	if h := o.Held; h != nil {
		fit.Held = &Held{Engine: Cut(h.Engine, MaxName), User: Cut(h.User, MaxName), Process: Cut(h.Process, MaxName)}
	}
	return fit
}

func fitLabels(labels map[string]string) map[string]string {
	total, fits := 0, len(labels) <= MaxLabels
	for k, v := range labels {
		total += len(k) + len(v)
		fits = fits && fitsLabel(k, v)
	}
	if fits && total <= MaxLabelBytes {
		return labels
	}
	out := make(map[string]string, MaxLabels)
	total = 0
	for _, k := range slices.Sorted(maps.Keys(labels)) {
		v := labels[k]
		if !fitsLabel(k, v) || total+len(k)+len(v) > MaxLabelBytes {
			continue
		}
		if len(out) == MaxLabels {
			break
		}
		total += len(k) + len(v)
		out[k] = v
	}
	return out
}

// leftOut returns the keys of the labels that are not sent, or none if not all can be named.
func leftOut(labels, sent map[string]string) (keys []string) {
	total := 0
	for _, k := range slices.Sorted(maps.Keys(labels)) {
		if _, ok := sent[k]; ok {
			continue
		}
		total += len(k)
		if len(keys) == MaxLabels || total > MaxLeftOut || !fitsLabel(k, "") {
			return nil
		}
		keys = append(keys, k)
	}
	return keys
}

func fitsLabel(k, v string) bool {
	return len(k) <= MaxLabelKey && len(v) <= MaxLabelValue && utf8.ValidString(k) && utf8.ValidString(v)
}

// Check reports whether a receiver would accept f as a port that is published, or as one that is
// not.
func (f Fact) Check(published bool) error {
	if err := f.Key.Check(); err != nil {
		return err
	}
	d := &f.Decision
	if d.Allow != published {
		return fmt.Errorf("%s: allowed %v, want %v", f.Key, d.Allow, published)
	}
	if d.Rule.OnHost {
		return fmt.Errorf("%s: a guest knows no %s", f.Key, d.Rule)
	}
	if !published && (len(f.Owner.Labels) > 0 || len(f.Others) > 0 || len(d.Host) > 0) {
		return fmt.Errorf("%s: labels, other owners or host addresses of a port that is not published", f.Key)
	}
	if published && !d.Reason.IsZero() {
		return fmt.Errorf("%s: reason of a port that is published", f.Key)
	}
	if published && d.Rule != (RuleRef{}) && !d.Labelled() { // people would take it for one of the host
		return fmt.Errorf("%s: published by %s, want none but a label", f.Key, d.Rule)
	}
	if len(d.Host) > MaxHosts {
		return fmt.Errorf("%s: %d host addresses, at most %d", f.Key, len(d.Host), MaxHosts)
	}
	for _, h := range d.Host { // port 0 asks for any free port
		if err := CheckAddr(h.Addr()); err != nil {
			return err
		}
	}
	return cmp.Or(d.Reason.checkDecided(), f.Owner.check(f.Key), f.checkOthers(), f.checkDemands(),
		CheckText("source", f.Source, MaxWord), CheckText("rule", d.Rule.Name, MaxReason), CheckText("alias", f.Alias(), MaxWord))
}

func (f *Fact) checkDemands() error {
	if n := len(f.Demands()); n > MaxDemands {
		return fmt.Errorf("%s: %d demands, at most %d", f.Key, n, MaxDemands)
	}
	for _, s := range f.Demands() {
		if d, err := ParseDemand(s); err != nil || d.String() != s {
			return fmt.Errorf("%s: %q is no demand", f.Key, Cut(s, MaxWord))
		}
	}
	return nil
}

func (f *Fact) checkOthers() error {
	if len(f.Others) > MaxOthers {
		return fmt.Errorf("%s: %d other owners, at most %d", f.Key, len(f.Others), MaxOthers)
	}
	total := 0
	for _, o := range f.Others {
		if err := o.check(f.Key); err != nil {
			return err
		}
		total += otherSize + o.textBytes()
	}
	if total > MaxOtherBytes {
		return fmt.Errorf("%s: %d bytes of other owners, at most %d", f.Key, total, MaxOtherBytes)
	}
	return nil
}

func (o *Owner) check(key Key) error {
	var held Held
	if o.Held != nil {
		held = *o.Held
	}
	for _, t := range [...]struct{ name, text string }{
		{"owner name", o.Name}, {"owner id", o.ID}, {"owner namespace", o.Namespace}, {"owner cluster", o.Cluster},
		{"engine of the owner", held.Engine}, {"user of the owner", held.User}, {"process of the owner", held.Process},
	} {
		if err := CheckText(t.name, t.text, MaxName); err != nil {
			return err
		}
	}
	if len(o.Labels) > MaxLabels {
		return fmt.Errorf("%s: %d labels, at most %d", key, len(o.Labels), MaxLabels)
	}
	total := 0
	for k, v := range o.Labels {
		if total += len(k) + len(v); total > MaxLabelBytes || !fitsLabel(k, v) {
			return fmt.Errorf("%s: labels too long or not UTF-8", key)
		}
	}
	if len(o.LeftOut()) > MaxLabels {
		return fmt.Errorf("%s: %d labels left out, at most %d are named", key, len(o.LeftOut()), MaxLabels)
	}
	total = 0
	for _, k := range o.LeftOut() {
		if total += len(k); total > MaxLeftOut || !fitsLabel(k, "") {
			return fmt.Errorf("%s: the key of a label that was left out is too long or not UTF-8", key)
		}
	}
	return nil
}

// TextBytes is how many bytes the text of a fact takes, and what only some facts have.
func (f Fact) TextBytes() int {
	n := len(f.Source) + f.Owner.textBytes() + len(f.Decision.Rule.Name) + f.Decision.Reason.textBytes()
	for _, o := range f.Others {
		n += otherSize + o.textBytes()
	}
	if f.Named != nil {
		n += namedSize + len(f.Named.Alias)
	}
	for _, d := range f.Demands() {
		n += len(d)
	}
	return n
}

func (o *Owner) textBytes() int {
	n := len(o.Name) + len(o.ID) + len(o.Namespace) + len(o.Cluster)
	if h := o.Held; h != nil {
		n += heldSize + len(h.Engine) + len(h.User) + len(h.Process)
	}
	for k, v := range o.Labels {
		n += len(k) + len(v)
	}
	for _, k := range o.LeftOut() {
		n += len(k)
	}
	return n
}

// NewAnswer returns the outcomes of one port as they are sent: not too many, and their reasons cut
// to MaxReason.
func NewAnswer(k Key, outcomes []Outcome) Answer {
	a := Answer{Key: k}
	for _, o := range outcomes[:min(len(outcomes), MaxOutcomes)] {
		a.Outcomes = append(a.Outcomes, Outcome{State: o.State, HostAddress: Unmap(o.HostAddress), Reason: o.Reason.fit()})
	}
	return a
}

// Check reports whether a receiver would accept a.
func (a Answer) Check() error {
	if err := a.Key.Check(); err != nil {
		return err
	}
	if n := len(a.Outcomes); n == 0 || n > MaxOutcomes {
		return fmt.Errorf("%s: %d outcomes, want 1 to %d", a.Key, n, MaxOutcomes)
	}
	for _, o := range a.Outcomes {
		if err := o.check(a.Key); err != nil {
			return err
		}
	}
	return nil
}

func (o Outcome) check(k Key) error {
	if o.State < Denied || o.State > Active {
		return fmt.Errorf("%s: no state", k)
	}
	if o.HostAddress != (netip.AddrPort{}) {
		if err := CheckAddr(o.HostAddress.Addr()); err != nil {
			return err
		}
	}
	if o.State == Active && o.HostAddress.Port() == 0 {
		return fmt.Errorf("%s: active without a host address", k)
	}
	return o.Reason.check()
}

// Check reports whether a receiver would accept k.
func (k Key) Check() error {
	if k.Protocol != TCP && k.Protocol != UDP {
		return fmt.Errorf("protocol %d, want tcp or udp", uint8(k.Protocol))
	}
	if k.Port == 0 {
		return errors.New("port 0")
	}
	return CheckAddr(k.Address)
}

// CheckAddr reports whether a receiver would accept an address.
func CheckAddr(a netip.Addr) error {
	switch {
	case !a.IsValid():
		return errors.New("no address")
	case a.Is4In6():
		return fmt.Errorf("address %s is mapped, want IPv4", a.WithZone(""))
	case len(a.Zone()) > MaxZone:
		return fmt.Errorf("zone of %d bytes, at most %d", len(a.Zone()), MaxZone)
	}
	for _, c := range []byte(a.Zone()) {
		if c <= ' ' || c > '~' {
			return fmt.Errorf("zone %q has a character that no interface has", a.Zone())
		}
	}
	return nil
}

// CheckText reports whether a receiver would accept a text of at most limit bytes.
func CheckText(what, s string, limit int) error {
	if len(s) > limit {
		return fmt.Errorf("%s of %d bytes, at most %d", what, len(s), limit)
	}
	if !utf8.ValidString(s) {
		return fmt.Errorf("%s is not UTF-8", what)
	}
	return nil
}

// Unmap returns an address without the form ::ffff:a.b.c.d; one that is not valid is zero.
func Unmap(a netip.AddrPort) netip.AddrPort {
	if !a.IsValid() {
		return netip.AddrPort{}
	}
	return netip.AddrPortFrom(a.Addr().Unmap(), a.Port())
}

// Cut shortens s to at most n bytes at the end of a character. What is not
// UTF-8 is replaced first: JSON would do so later, and make it longer.
func Cut(s string, n int) string {
	s = strings.ToValidUTF8(s, "\uFFFD")
	if len(s) <= n {
		return s
	}
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n]
}

// OneLine replaces what would break a line or steer a terminal.
func OneLine(s string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f || (r >= 0x80 && r < 0xa0) {
			return ' '
		}
		return r
	}, s)
}

// List is a JSON array that is read up to MaxListItems: a few bytes of text become
// a much larger struct, so the message's limit alone does not bound memory.
type List[T any] []T

// UnmarshalJSONFrom implements json.UnmarshalerFrom.
func (l *List[T]) UnmarshalJSONFrom(d *jsontext.Decoder) error {
	t, err := d.ReadToken()
	switch {
	case err != nil:
		return err
	case t.Kind() == 'n':
		*l = nil
		return nil
	case t.Kind() != '[':
		return errors.New("want a list")
	}
	items := []T{}
	for d.PeekKind() != ']' {
		if len(items) == MaxListItems {
			return fmt.Errorf("more than %d items", MaxListItems)
		}
		items = append(items, *new(T))
		if err := json.UnmarshalDecode(d, &items[len(items)-1]); err != nil {
			return err
		}
	}
	*l = items
	_, err = d.ReadToken()
	return err
}
