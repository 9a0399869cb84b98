// SPDX-License-Identifier: Apache-2.0

package port

import (
	"fmt"

	"github.com/go-json-experiment/json"
)

// oneReason is one of a Reason in JSON, which is a list of codes with what belongs in their
// texts. The reader has the texts.
type oneReason struct {
	Code string       `json:"code"`
	Args List[string] `json:"args,omitempty"`
	Rule *RuleRef     `json:"rule,omitzero"` // where the text names one
}

// fit returns r as it is sent. Arguments that are too long, and reasons that are too many, are
// left out from the end.
func (r Reason) fit() Reason {
	if r.IsZero() {
		return r
	}
	var list []Reason
	room := MaxReason
	cut := func(s string) string {
		s = Cut(s, room)
		room -= len(s)
		return s
	}
	for one := range r.All() {
		if len(list) == MaxReasons {
			break
		}
		list = append(list, one.mapText(cut))
	}
	return Join(list...)
}

// mapText applies f to all text of the first reason.
func (r Reason) mapText(f func(string) string) Reason {
	rule, args := r.Rule(), r.Args()
	rule.Name = f(rule.Name)
	for i, arg := range args {
		args[i] = f(arg)
	}
	return rule.Because(r.Code(), args...)
}

// MarshalJSON implements json.Marshaler. What no reader would take is left out, as on the link:
// reasons come here from the sources too, for the control socket.
func (r Reason) MarshalJSON() ([]byte, error) {
	list := []oneReason{}
	for one := range r.fit().All() {
		o := oneReason{Code: one.Code().String(), Args: one.Args()}
		if rule := one.Rule(); rule != (RuleRef{}) {
			o.Rule = &rule
		}
		list = append(list, o)
	}
	return json.Marshal(list)
}

// UnmarshalJSON implements json.Unmarshaler. Text is put on one line.
func (r *Reason) UnmarshalJSON(b []byte) error {
	var list List[oneReason]
	if err := json.Unmarshal(b, &list); err != nil {
		return err
	}
	if len(list) > MaxReasons {
		return fmt.Errorf("%d reasons, at most %d", len(list), MaxReasons)
	}
	var reasons []Reason
	for _, o := range list {
		code, ok := ParseCode(o.Code)
		switch {
		case !ok:
			return fmt.Errorf("unknown reason %q", o.Code)
		case len(o.Args) != code.Places():
			return fmt.Errorf("reason %s has %d arguments, want %d", code, len(o.Args), code.Places())
		case code.NamesRule() != (o.Rule != nil && o.Rule.Kind != NoRule):
			return fmt.Errorf("reason %s: want a rule if it is about one", code)
		}
		var rule RuleRef
		if o.Rule != nil {
			rule = *o.Rule
		}
		reasons = append(reasons, rule.Because(code, o.Args...).mapText(OneLine))
	}
	*r = Join(reasons...)
	return nil
}

// textBytes is how many bytes of text a reason has.
func (r Reason) textBytes() (n int) {
	for one := range r.All() {
		n += len(one.Rule().Name)
		for _, arg := range one.Args() {
			n += len(arg)
		}
	}
	return n
}

func (r Reason) check() error {
	if n := r.textBytes(); n > MaxReason {
		return fmt.Errorf("reason of %d bytes, at most %d", n, MaxReason)
	}
	return nil
}

// checkDecided checks a reason for which rules of a guest do not allow a port.
func (r Reason) checkDecided() error {
	for one := range r.All() {
		code := one.Code()
		waits := code == OwnerAwaited || code == OwnerContested
		if k := code.Kind(); k != Denies && k != Withholds && !waits || one.Verdict() == VerdictHostDenied {
			return fmt.Errorf("reason %s of a port that a guest does not publish", code)
		}
	}
	return r.check()
}
