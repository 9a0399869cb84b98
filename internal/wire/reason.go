// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"

	"github.com/fairlead/fairlead/internal/port"
)

// Reason is a port.Reason on the wire: a list of codes with what belongs in their texts. The
// receiver has the texts.
type Reason struct{ port.Reason }

// MaxReasons is how many reasons a Reason has at most. All arguments together have at most
// MaxReason bytes.
const MaxReasons = 16

// oneReason is one of a Reason.
type oneReason struct {
	Code string        `json:"code"`
	Args List[string]  `json:"args,omitempty"`
	Rule *port.RuleRef `json:"rule,omitzero"` // where the text names one
}

// FromReason returns r for the wire. Arguments that are too long, and reasons that are too
// many, are left out from the end.
func FromReason(r port.Reason) Reason {
	var list []port.Reason
	room := MaxReason
	fit := func(s string) string {
		s = truncate(s, room)
		room -= len(s)
		return s
	}
	for one := range r.All() {
		if len(list) == MaxReasons {
			break
		}
		list = append(list, mapReason(one, fit))
	}
	return Reason{port.Join(list...)}
}

// mapReason applies f to all text of the first reason.
func mapReason(r port.Reason, f func(string) string) port.Reason {
	rule, args := r.Rule(), r.Args()
	rule.Name = f(rule.Name)
	for i, arg := range args {
		args[i] = f(arg)
	}
	return rule.Because(r.Code(), args...)
}

// MarshalJSONTo implements json.MarshalerTo.
func (r Reason) MarshalJSONTo(e *jsontext.Encoder) error {
	var list []oneReason
	for one := range r.All() {
		o := oneReason{Code: one.Code().String(), Args: one.Args()}
		if rule := one.Rule(); rule != (port.RuleRef{}) {
			o.Rule = &rule
		}
		list = append(list, o)
	}
	return json.MarshalEncode(e, list)
}

// UnmarshalJSONFrom implements json.UnmarshalerFrom. Text of the peer is put on one line.
func (r *Reason) UnmarshalJSONFrom(d *jsontext.Decoder) error {
	var list List[oneReason]
	if err := json.UnmarshalDecode(d, &list); err != nil {
		return err
	}
	if len(list) > MaxReasons {
		return malformed("%d reasons, at most %d", len(list), MaxReasons)
	}
	var reasons []port.Reason
	for _, o := range list {
		code, ok := port.ParseCode(o.Code)
		switch {
		case !ok:
			return malformed("unknown reason %q", o.Code)
		case len(o.Args) != code.Places():
			return malformed("reason %s has %d arguments, want %d", code, len(o.Args), code.Places())
		case code.NamesRule() != (o.Rule != nil && o.Rule.Kind != port.NoRule):
			return malformed("reason %s: want a rule if it is about one", code)
		}
		var rule port.RuleRef
		if o.Rule != nil {
			rule = *o.Rule
		}
		reasons = append(reasons, mapReason(rule.Because(code, o.Args...), oneLine))
	}
	r.Reason = port.Join(reasons...)
	return nil
}

// size is how many bytes of text a reason has, and how many reasons it is.
func (r Reason) size() (text, n int) {
	for one := range r.All() {
		n++
		text += len(one.Rule().Name)
		for _, arg := range one.Args() {
			text += len(arg)
		}
	}
	return text, n
}

// encodedSize is an upper bound.
func (r Reason) encodedSize() int {
	text, n := r.size()
	return 192*n + 6*text
}

func (r Reason) check() error {
	if text, _ := r.size(); text > MaxReason {
		return malformed("reason of %d bytes, at most %d", text, MaxReason)
	}
	return nil
}

// checkDecided checks a reason for which rules of a guest do not allow a port.
func (r Reason) checkDecided() error {
	for one := range r.All() {
		code := one.Code()
		waits := code == port.OwnerAwaited || code == port.OwnerContested
		if k := code.Kind(); k != port.Denies && k != port.Withholds && !waits || one.Verdict() == port.VerdictHostDenied {
			return malformed("reason %s of a port that a guest does not publish", code)
		}
	}
	return r.check()
}
