// SPDX-License-Identifier: Apache-2.0

package link

import "fmt"

// Refusal is one word for why a peer was refused. The set is bounded, so that
// it can label a metric.
type Refusal string

// Why a peer is refused.
const (
	RefusedCID       Refusal = "cid"       // vsock context that is not allowed
	RefusedUID       Refusal = "uid"       // user that is not allowed
	RefusedMagic     Refusal = "magic"     // speaks something else
	RefusedVersion   Refusal = "version"   // no protocol version in common
	RefusedRole      Refusal = "role"      // has the same role as we
	RefusedToken     Refusal = "token"     // has no token and we do, or the reverse
	RefusedProof     Refusal = "proof"     // does not know the token
	RefusedMalformed Refusal = "malformed" // sent what it must not
	RefusedTimeout   Refusal = "timeout"   // did not finish in time
	RefusedBusy      Refusal = "busy"      // gave way to newer peers
	RefusedLost      Refusal = "lost"      // went away
	RefusedOther     Refusal = "other"     // an error of our own; what a peer said that we do not know
)

func (r Refusal) known() bool {
	switch r {
	case RefusedCID, RefusedUID, RefusedMagic, RefusedVersion, RefusedRole, RefusedToken, RefusedProof,
		RefusedMalformed, RefusedTimeout, RefusedBusy, RefusedLost:
		return true
	}
	return false
}

// RefusedError says why there is no session with a peer.
type RefusedError struct {
	Code   Refusal
	Detail string // for people; what a peer wrote in it is quoted
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
