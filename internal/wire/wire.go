// SPDX-License-Identifier: Apache-2.0

// Package wire is the protocol between guest agent and host peer: message schema,
// framing and limits. It does no authentication and holds no state.
package wire

import (
	"net/netip"

	"github.com/fairlead/fairlead/internal/port"
)

// Version is the protocol version that this build speaks. Version 2 has a
// connection for each flow where the host dials.
const Version = 2

// Limits of what one peer may send to the other.
const (
	MaxControlFrame = 1 << 20   // bytes of one control message
	MaxHelloFrame   = 4 << 10   // bytes of one handshake message
	MaxRequestFrame = 4 << 10   // bytes of one flow request or reply
	MaxDatagram     = 65535     // bytes of one UDP payload
	MaxPublications = 2 * 65536 // of one guest: 65,536 ports in both families
	MaxSetBytes     = 64 << 20  // text (names, labels) in one guest's set
	SnapshotPart    = 512       // items that a sender puts in one part of a message
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
	MaxLabels     = 64       // labels of one owner
	MaxLabelKey   = 256      // key of one label
	MaxLabelValue = 1024     // value of one label
	MaxLabelBytes = 8192     // all keys and values of one owner's labels
	MaxLeftOut    = 2048     // all keys of one owner's labels that are left out
	MaxOthers     = 256      // other owners of one publication
	MaxOtherBytes = 96 << 10 // names and labels of all of these, and otherSize for each
)

// Limits of what a host keeps of one guest beside its publications; see Unpublished.
const (
	MaxUnpublished = 4096 // of 2,048 ports in both families
	MaxUnread      = 64   // NAT rules
)

// MaxIncomplete is how many sources Snapshot.Incomplete names at most.
const MaxIncomplete = 16

// Control is one message on the control stream; exactly one field is set.
type Control struct {
	Snapshot *Snapshot `json:"snapshot,omitempty"` // agent to host
	Change   *Change   `json:"change,omitempty"`   // agent to host
	Ack      *Ack      `json:"ack,omitempty"`      // host to agent
	Outcomes *Outcomes `json:"outcomes,omitempty"` // host to agent, at any time
	Resync   *Resync   `json:"resync,omitempty"`   // host to agent

	Unpublished *Unpublished `json:"unpublished,omitzero"` // agent to host
}

// Snapshot is the whole wanted set. A large one comes in parts: More is set on
// all but the last, and the host applies nothing before the last.
type Snapshot struct {
	Epoch        string            `json:"epoch"` // names one life of the agent
	Generation   uint64            `json:"generation"`
	Publications List[Publication] `json:"publications"`
	More         bool              `json:"more,omitzero"`
	// Incomplete names sources that the agent has not read yet, as one whose engine does
	// not answer: their ports may be missing. The host keeps the ports that an earlier
	// session had and that are missing here, until a snapshot comes that is complete, or
	// for a limited time.
	Incomplete List[string] `json:"incomplete,omitempty"`
}

// Change turns the set of generation Base into that of Generation. A host that
// is not at Base answers Resync and applies nothing. A large one comes in
// parts with the same Base and Generation, as a Snapshot does; see Joiner.
type Change struct {
	Base       uint64            `json:"base"`
	Generation uint64            `json:"generation"`
	Put        List[Publication] `json:"put,omitempty"`
	Removed    List[port.Key]    `json:"removed,omitempty"`
	More       bool              `json:"more,omitzero"`
}

// Ack reports that the host is at Generation, with the outcomes of the publications
// that the acknowledged message named. What does not fit in one frame is sent
// before it in Outcomes; see Split.
type Ack struct {
	Generation uint64        `json:"generation"`
	Outcomes   List[Outcome] `json:"outcomes,omitempty"`
}

// Outcomes reports outcomes that changed since the last Ack (a conflict that ended,
// a listener that failed, progress with a large set). For each key it names, it is
// complete.
type Outcomes struct {
	Outcomes List[Outcome] `json:"outcomes"`
}

// Resync asks for a snapshot, and for a new report of the ports that are not published:
// what the host dropped may have been of either.
type Resync struct {
	Reason string `json:"reason"`
}

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

// Unpublished changes what the host knows of ports that the agent does not publish. It is
// text for users of the host: there is neither a host address nor anything to dial in it, and
// the agent refuses flows to such ports. It is sent only to a host whose Hello has
// Unpublished, belongs to no generation and is not acknowledged. The first one of a session,
// and the first one after a Resync, has Reset.
type Unpublished struct {
	Reset   bool                  `json:"reset,omitzero"` // forget what was sent before
	More    bool                  `json:"more,omitzero"`  // the next one belongs to it
	Put     List[UnpublishedPort] `json:"put,omitempty"`
	Removed List[port.Key]        `json:"removed,omitempty"`
	Omitted int                   `json:"omitted,omitzero"` // ports that were not sent, beyond MaxUnpublished
	// Unread are the NAT rules that the agent does not understand, at most MaxUnread. They
	// replace those sent before. Nil leaves those alone.
	Unread *List[Unread] `json:"unread,omitzero"`
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

// Limits of forwards by name. A text has at most MaxReason bytes.
const (
	MaxDemandsOfOne = 16 // of one port
)

// Outcome is port.Outcome on the wire.
type Outcome struct {
	port.Key
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
