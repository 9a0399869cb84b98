// SPDX-License-Identifier: Apache-2.0

package port

import (
	"cmp"
	"iter"
	"slices"
	"strings"
	"unique"
)

// Reason is why a row has its state: a code, and arguments for its text. A decision may have
// several reasons, in order, see Join. The zero value is no reason. Reasons are immutable and
// compare with ==; equal ones share their memory.
type Reason struct{ of unique.Handle[because] }

type because struct {
	code Code
	args [MaxArgs]string
	rule RuleRef
	next Reason
}

// MaxArgs is how many arguments a code has at most.
const MaxArgs = 3

// Because returns a reason. There must be as many arguments as the code's text has places.
// Arguments may be text of the guest: they are data to be quoted.
func Because(c Code, args ...string) Reason { return RuleRef{}.Because(c, args...) }

// Because returns a reason whose text names the rule.
func (r RuleRef) Because(c Code, args ...string) Reason {
	b := because{code: c, rule: r}
	copy(b.args[:], args)
	return Reason{unique.Make(b)}
}

// Join returns the reasons of a list in order, each once.
func Join(list ...Reason) Reason {
	var all []because
	for _, r := range list {
		for c := range r.All() {
			b := c.of.Value()
			b.next = Reason{}
			if !slices.Contains(all, b) {
				all = append(all, b)
			}
		}
	}
	var joined Reason
	for _, b := range slices.Backward(all) {
		b.next = joined
		joined = Reason{unique.Make(b)}
	}
	return joined
}

// IsZero reports whether there is no reason.
func (r Reason) IsZero() bool { return r == Reason{} }

// Code returns the code of the first reason, Unstated if there is none.
func (r Reason) Code() Code {
	if r.IsZero() {
		return Unstated
	}
	return r.of.Value().code
}

// Args returns the arguments of the first reason.
func (r Reason) Args() []string {
	if r.IsZero() {
		return nil
	}
	b := r.of.Value()
	return slices.Clone(b.args[:b.code.Places()])
}

// All returns the reasons one by one.
func (r Reason) All() iter.Seq[Reason] {
	return func(yield func(Reason) bool) {
		for !r.IsZero() && yield(r) {
			r = r.of.Value().next
		}
	}
}

// Rule returns the rule that the first reason names.
func (r Reason) Rule() RuleRef {
	if r.IsZero() {
		return RuleRef{}
	}
	return r.of.Value().rule
}

// Kind returns what the first reason does, 0 if there is none.
func (r Reason) Kind() Kind { return r.Code().Kind() }

// Verdict returns what `fairlead explain` answers because of the first reason.
func (r Reason) Verdict() Verdict {
	if r.Rule().OnHost && r.Kind() == Denies {
		return VerdictHostDenied
	}
	info := r.Code().info()
	return cmp.Or(info.verdict, kinds[info.kind].verdict)
}

// Advice returns what to do about the first reason, with places for what depends on the port:
// see package explain.
func (r Reason) Advice() string {
	info := r.Code().info()
	return cmp.Or(info.advice, kinds[info.kind].advice)
}

// String returns the text, "" for no reason. Several reasons are separated by "; ".
func (r Reason) String() string {
	if r.IsZero() {
		return ""
	}
	b := r.of.Value()
	text := b.text()
	for one := range b.next.All() {
		text += "; " + one.of.Value().text()
	}
	return text
}

// text is the code's, with arguments and the rule in their places.
func (b because) text() string {
	text := b.code.info().text
	if !strings.Contains(text, "{") {
		return text
	}
	places := append(make([]string, 0, 2*MaxArgs+2), rulePlace, b.rule.String())
	for i, arg := range b.args {
		places = append(places, argPlaces[i], arg)
	}
	return strings.NewReplacer(places...).Replace(text)
}

// Reach is who reaches what a reason is about, though it is not published.
type Reach uint8

// From nobody to everybody. Nobody means: at most programs of the same machine.
const (
	Nobody Reach = iota
	Some         // some clients, or it is not known
	Everybody
)

// Reach returns who reaches the port: everybody, unless it is withheld for a reason that keeps
// some from it. Of several reasons the widest counts.
func (r Reason) Reach() (widest Reach) {
	if r.Kind() != Withholds {
		return Everybody
	}
	for one := range r.All() {
		widest = max(widest, one.Code().info().reach)
	}
	return widest
}
