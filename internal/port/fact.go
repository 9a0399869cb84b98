// SPDX-License-Identifier: Apache-2.0

package port

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
)

// Fact is a guest's word on one of its ports. A host decodes a Fact and nothing else of what a
// guest says of a port, so its fields are all that a guest can set. It is immutable. A new field
// needs a line in each method of this file that names all fields.
type Fact struct {
	Key
	// OwnerPending is true while an engine is expected to name another owner. On a host it is
	// also true if the guest does not name all owners.
	OwnerPending bool             `json:"ownerPending,omitzero"`
	Owner        Owner            `json:"owner"`
	Others       List[OtherOwner] `json:"others,omitempty"` // shared and immutable
	Source       string           `json:"source,omitempty"` // of its first origin; see Origin

	// Target is a hash of where the NAT rule leads that opens the port: ports with one Target lead
	// to the same servers. 0 means that no rule opens it, or that several do which lead elsewhere.
	Target uint64 `json:"target,omitzero"`

	Decision Decision `json:"decision"`
	*Named            // nil for none; shared and immutable; see Alias and Demands
}

// Decision is what rules decide about a port.
type Decision struct {
	Allow  bool `json:"allow,omitzero"`
	Yields bool `json:"yields,omitzero"` // labels ask for another host port: whoever asks for it without labels goes first

	Rule   RuleRef          `json:"rule,omitzero"`   // that decided; of a port that it publishes a guest tells a host labels alone
	Reason Reason           `json:"reason,omitzero"` // why it is not allowed
	Host   []netip.AddrPort `json:"host,omitempty"`  // the host addresses asked for; port 0 asks for any free port; shared and immutable
}

// Named are names by which a port is asked for, which few ports have.
type Named struct {
	Alias   string       `json:"alias,omitempty"`   // that a label gives the owner on the host
	Demands List[string] `json:"demands,omitempty"` // that users gave; each is a Demand
}

// Withheld reports a denial by default: no rule forbids the port, but nothing is a reason to
// publish it either. Its flows are not reset.
func (d Decision) Withheld() bool { return !d.Allow && d.Reason.Kind() == Withholds }

// Pending reports a provisional denial: what the rules decide depends on an owner that is not
// known yet.
func (d Decision) Pending() bool { return !d.Allow && d.Reason.Kind() == Waits }

// Labelled reports whether labels of the owner decided, which Rule names.
func (d Decision) Labelled() bool { return d.Rule.Kind == RuleLabel && d.Rule.Name != "" }

// Equal reports whether both are the same.
func (d Decision) Equal(e Decision) bool {
	return d.Allow == e.Allow && d.Yields == e.Yields && d.Rule == e.Rule && d.Reason == e.Reason && slices.Equal(d.Host, e.Host)
}

// Alias is a name that a label gives the owner, empty for none.
func (f *Fact) Alias() string {
	if f.Named == nil {
		return ""
	}
	return f.Named.Alias
}

// Demands are the names by which users asked for the port, each as of Demand.String. The caller
// must not change them.
func (f *Fact) Demands() []string {
	if f.Named == nil {
		return nil
	}
	return f.Named.Demands
}

// SetNamed sets Alias and Demands.
func (f *Fact) SetNamed(alias string, demands []string) {
	f.Named = nil
	if alias != "" || len(demands) > 0 {
		f.Named = &Named{alias, demands}
	}
}

// Demanded reports whether the port is there because of d.
func (f *Fact) Demanded(d Demand) bool { return slices.Contains(f.Demands(), d.String()) }

// Beside returns who serves the port beside its owner, for people: not the containers behind a
// Service, and no labels.
func (f *Fact) Beside() (list []OtherOwner) {
	for _, o := range f.Others {
		if f.Owner.Kind != OwnerService || o.Kind != OwnerContainer {
			o.Labels, o.LabelsOmitted, o.LabelsLeftOut = nil, false, nil
			list = append(list, o)
		}
	}
	return list
}

// Equal reports whether both are the same.
func (f Fact) Equal(g Fact) bool {
	return f.Key == g.Key && f.OwnerPending == g.OwnerPending && f.Owner.Equal(g.Owner) && slices.EqualFunc(f.Others, g.Others, OtherOwner.equal) &&
		f.Source == g.Source && f.Target == g.Target && f.Decision.Equal(g.Decision) && f.Alias() == g.Alias() && slices.Equal(f.Demands(), g.Demands())
}

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

// addOthers adds the other owners who serve the port, as far as they fit. Where engines
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
