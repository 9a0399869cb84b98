// SPDX-License-Identifier: Apache-2.0

package link

import "fmt"

// Refusal is the code of why a peer was refused. The set is bounded, so that
// it can label a metric.
type Refusal string

// Why a peer is refused.
const (
	RefusedCID       Refusal = "cid"       // vsock context that is not allowed
	RefusedUID       Refusal = "uid"       // user that is not allowed
	RefusedMagic     Refusal = "magic"     // another protocol
	RefusedVersion   Refusal = "version"   // no protocol version in common
	RefusedRole      Refusal = "role"      // the same role as ours
	RefusedNetwork   Refusal = "network"   // the same network namespace as ours
	RefusedToken     Refusal = "token"     // only one side has a token
	RefusedProof     Refusal = "proof"     // another token
	RefusedMalformed Refusal = "malformed" // a malformed message
	RefusedTimeout   Refusal = "timeout"   // did not finish in time
	RefusedBusy      Refusal = "busy"      // closed for newer peers
	RefusedLost      Refusal = "lost"      // closed the connection
	RefusedOther     Refusal = "other"     // an error of our own, or an unknown code of the peer
)

func (r Refusal) known() bool {
	switch r {
	case RefusedCID, RefusedUID, RefusedMagic, RefusedVersion, RefusedRole, RefusedNetwork, RefusedToken, RefusedProof,
		RefusedMalformed, RefusedTimeout, RefusedBusy, RefusedLost:
		return true
	}
	return false
}

// RefusedError is why there is no session with a peer.
type RefusedError struct {
	Code   Refusal
	Detail string // human-readable; a peer's own text in it is quoted
	Remote bool   // the peer refused us
	Err    error  // the cause, if there is one
}

// Error implements error.
func (e *RefusedError) Error() string {
	who := "peer refused"
	if e.Remote {
		who = "refused by the peer"
	}
	s := fmt.Sprintf("%s (%s): %s", who, e.Code, e.Detail)
	if e.Err != nil {
		s += ": " + e.Err.Error()
	}
	return s
}

// Unwrap returns the cause.
func (e *RefusedError) Unwrap() error { return e.Err }

func refuse(code Refusal, format string, args ...any) *RefusedError {
	return &RefusedError{Code: code, Detail: fmt.Sprintf(format, args...)}
}
