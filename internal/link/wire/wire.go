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

// Limits of what one peer may send to the other. Package port has those of one row.
const (
	MaxControlFrame = 1 << 20   // bytes of one control message
	MaxHelloFrame   = 4 << 10   // bytes of one handshake message
	MaxRequestFrame = 4 << 10   // bytes of one flow request or reply
	MaxDatagram     = 65535     // bytes of one UDP payload
	MaxPublications = 2 * 65536 // of one guest: 65,536 ports in both families
	MaxSetBytes     = 64 << 20  // text (names, labels) in one guest's set
)

// Limits of what a host keeps of one guest beside its publications.
const (
	MaxUnpublished = 4096 // of 2,048 ports in both families
	MaxUnread      = 64   // NAT rules
)

// MaxPartial is how many sources Frame.Partial names at most.
const MaxPartial = 16

// Unread is a NAT rule that the agent does not understand. Each text has at most MaxReason
// bytes.
type Unread struct {
	Where  string `json:"where"` // table and chains
	Rule   string `json:"rule"`  // its text
	Reason string `json:"reason"`
}

// NewUnread returns a NAT rule for the wire, truncated.
func NewUnread(where, rule, reason string) Unread {
	return Unread{Text(where), Text(rule), Text(reason)}
}

// Compare orders rules by their place.
func (r Unread) Compare(q Unread) int {
	return cmp.Or(cmp.Compare(r.Where, q.Where), cmp.Compare(r.Rule, q.Rule), cmp.Compare(r.Reason, q.Reason))
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
