// SPDX-License-Identifier: Apache-2.0

// Package wire is the protocol between guest agent and host peer: message schema,
// framing and limits. It does no authentication and holds no state.
package wire

import (
	"cmp"
	"net/netip"

	"github.com/fairlead/fairlead/internal/port"
)

// Version is the protocol version that this build speaks. Both sides must have the same.
const Version = 3

// Limits of what one peer may send to the other.
const (
	MaxControlFrame = 1 << 20   // bytes of one control message
	MaxHelloFrame   = 4 << 10   // bytes of one handshake message
	MaxRequestFrame = 4 << 10   // bytes of one flow request or reply
	MaxDatagram     = 65535     // bytes of one UDP payload
	MaxPublications = 2 * 65536 // of one guest: 65,536 ports in both families
	MaxSetBytes     = 64 << 20  // text (names, labels) in one guest's set
	MaxListItems    = 16384     // items that a receiver takes in one list of a message
)

// Limits of one item, in bytes where it is text. A sender truncates or leaves out
// what is longer, a receiver refuses it.
const (
	MaxName       = 256      // name, ID and namespace of an owner; host names
	MaxWord       = 64       // epoch, source, identity, build version
	MaxReason     = 512      // reasons of outcomes, replies and refusals
	MaxZone       = 32       // zone of a link-local address
	MaxHosts      = 16       // host addresses of one publication
	MaxOutcomes   = 32       // of one publication: two for each host address that it can ask for
	MaxLabels     = 64       // labels of one owner
	MaxLabelKey   = 256      // key of one label
	MaxLabelValue = 1024     // value of one label
	MaxLabelBytes = 8192     // all keys and values of one owner's labels
	MaxLeftOut    = 2048     // all keys of one owner's labels that are left out
	MaxOthers     = 256      // other owners of one publication
	MaxOtherBytes = 96 << 10 // names and labels of all of these, and otherSize for each
)

// Limits of what a host keeps of one guest beside its publications.
const (
	MaxUnpublished = 4096 // of 2,048 ports in both families
	MaxUnread      = 64   // NAT rules
)

// MaxPartial is how many sources Frame.Partial names at most.
const MaxPartial = 16

// Publication is what the host needs to know of a publication.
type Publication struct {
	port.Key
	Host   []netip.AddrPort `json:"host"` // host addresses asked for
	Owner  port.Owner       `json:"owner"`
	Source string           `json:"source,omitempty"` // of its first origin, for host rules
	Rule   uint64           `json:"rule,omitzero"`    // see port.Publication
	// OwnerPending reports that the owner may turn out to be another: it is pending in
	// the agent, engines name several, or Others does not name all. Agents that do not
	// send it sent owners that may change.
	OwnerPending bool `json:"ownerPending,omitzero"`
	// Others are owners to whom NAT rules lead besides Owner. Agents that do not send
	// them do not report such owners.
	Others List[port.Owner] `json:"others,omitempty"`
	// Labels is what labels of the owner ask for and get, nil for nothing. Peers that do not
	// know it neither send nor obey it.
	Labels *Labels `json:"labels,omitempty"` // immutable
	// Demands are what the port was asked for by, at most MaxDemandsOfOne, as port.Demand has
	// it. Those that a host cannot read it ignores.
	Demands List[string] `json:"demands,omitempty"`
}

// Labels is what labels of an owner ask for; see port.Decision.
type Labels struct {
	Rule   string `json:"rule,omitempty"` // the decision's, if labels decided
	Yields bool   `json:"yields,omitzero"`
	Alias  string `json:"alias,omitempty"`
}

// Ref names the labels as a rule, if they decided.
func (l Labels) Ref() port.RuleRef {
	if l.Rule == "" {
		return port.RuleRef{}
	}
	return port.RuleRef{Kind: port.RuleLabel, Name: l.Rule}
}

// Wish returns what labels ask for, the zero value for nothing.
func (p *Publication) Wish() Labels {
	if p.Labels == nil {
		return Labels{}
	}
	return *p.Labels
}

// UnpublishedPort is a port that is denied, withheld or pending in the guest.
type UnpublishedPort struct {
	port.Key
	Rule    port.RuleRef `json:"rule,omitzero"`
	Reason  Reason       `json:"reason,omitzero"`
	Owner   port.Owner   `json:"owner"` // without labels
	Source  string       `json:"source,omitempty"`
	Demands List[string] `json:"demands,omitempty"` // as of Publication
}

// Unread is a NAT rule that the agent does not understand. Each text has at most MaxReason
// bytes.
type Unread struct {
	Where  string `json:"where"` // table and chains
	Rule   string `json:"rule"`  // its text
	Reason string `json:"reason"`
}

// Compare orders rules by their place.
func (r Unread) Compare(q Unread) int {
	return cmp.Or(cmp.Compare(r.Where, q.Where), cmp.Compare(r.Rule, q.Rule), cmp.Compare(r.Reason, q.Reason))
}

// Limits of forwards by name. A text has at most MaxReason bytes.
const (
	MaxDemandsOfOne = 16 // of one port
)

// Answer is what became of a publication on the host.
type Answer struct {
	port.Key
	Outcomes List[Outcome] `json:"outcomes"` // at most MaxOutcomes
}

// Outcome is port.Outcome on the wire, without its key.
type Outcome struct {
	State       port.State     `json:"state"`
	HostAddress netip.AddrPort `json:"hostAddress"`
	Reason      Reason         `json:"reason,omitzero"`
}

// FlowRequest is the first frame of a flow, sent by the host. It names a
// publication, never an address to dial.
type FlowRequest struct {
	Key  port.Key       `json:"key"`
	Peer netip.AddrPort `json:"peer"` // the client of the host, for logs, the choice of family, and servers that are told
	// At is where the client connected to on the host, for servers that are told.
	At netip.AddrPort `json:"at,omitzero"`
}

// FlowStatus is the agent's answer to a FlowRequest.
type FlowStatus string

// The answers to a flow request. Only after FlowOK do bytes run.
const (
	FlowOK          FlowStatus = "ok"
	FlowRefused     FlowStatus = "refused"     // nothing accepts at the dial target
	FlowForbidden   FlowStatus = "forbidden"   // no such publication, or over a limit
	FlowUnreachable FlowStatus = "unreachable" // the dial target did not answer
)

// FlowReply answers a FlowRequest.
type FlowReply struct {
	Status FlowStatus `json:"status"`
	Reason string     `json:"reason,omitempty"`
}
