// SPDX-License-Identifier: Apache-2.0

package port

import (
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
