// SPDX-License-Identifier: Apache-2.0

package port

import (
	"net/netip"
	"slices"
)

// Fact is a guest's word on one of its ports. A host decodes a Fact and nothing else of what a
// guest says of a port, so its fields are all that a guest can set. It is immutable. What a new
// field needs beside Equal stands in fit.go.
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

// Equal reports whether both are the same.
func (f Fact) Equal(g Fact) bool {
	return f.Key == g.Key && f.OwnerPending == g.OwnerPending && f.Owner.Equal(g.Owner) && slices.EqualFunc(f.Others, g.Others, OtherOwner.equal) &&
		f.Source == g.Source && f.Target == g.Target && f.Decision.Equal(g.Decision) && f.Alias() == g.Alias() && slices.Equal(f.Demands(), g.Demands())
}
