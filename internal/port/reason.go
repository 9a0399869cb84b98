// SPDX-License-Identifier: Apache-2.0

package port

import (
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
	args [maxArgs]string
	next Reason
}

const maxArgs = 3

// Because returns a reason. There must be as many arguments as the code's text has places.
// Arguments may be text of the guest: they are data to be quoted.
func Because(c Code, args ...string) Reason {
	b := because{code: c}
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
	return slices.Clone(b.args[:b.code.places()])
}

// All returns the reasons one by one.
func (r Reason) All() iter.Seq[Reason] {
	return func(yield func(Reason) bool) {
		for !r.IsZero() && yield(r) {
			r = r.of.Value().next
		}
	}
}

// String returns the text, "" for no reason. Several reasons are separated by "; ".
func (r Reason) String() string {
	var texts []string
	for one := range r.All() {
		args := one.of.Value().args
		texts = append(texts, strings.NewReplacer("{0}", args[0], "{1}", args[1], "{2}", args[2]).Replace(one.Code().info().text))
	}
	return strings.Join(texts, "; ")
}

// Reach is who reaches what a reason is about, though it is not published.
type Reach uint8

// From nobody to everybody. Nobody means: at most programs of the same machine.
const (
	Nobody Reach = iota
	Some         // some clients, or it is not known
	Everybody
)

// Reach returns who reaches the port, the zero value's answer is Everybody: nothing keeps
// anybody from it. Of several reasons the widest counts.
func (r Reason) Reach() (widest Reach) {
	if r.IsZero() {
		return Everybody
	}
	for one := range r.All() {
		widest = max(widest, one.Code().info().reach)
	}
	return widest
}
