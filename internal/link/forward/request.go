// SPDX-License-Identifier: Apache-2.0

package forward

import (
	"net/netip"

	"github.com/fairlead/fairlead/internal/port"
)

// Request asks for the flow of one client.
type Request struct {
	Publication port.Publication // what the client connected to
	Peer        netip.AddrPort   // the client; not valid if it is not known
	At          netip.AddrPort   // where it connected to; not valid if that is not known
	// Hidden says that Peer is somebody between, and not to be named to a server as its client.
	Hidden bool
	// Answer, if not nil, reports to the client's side, before any bytes of the
	// flow, whether it was opened: nil, or a *DialError.
	Answer func(error) error
}

// DialError is why no target of a publication could be reached.
type DialError struct {
	Refused bool // one of them refused, or none may be dialled; else none answered
	Err     error
}

// Error implements error.
func (e *DialError) Error() string {
	if e.Refused {
		return "refused: " + e.Err.Error()
	}
	return "unreachable: " + e.Err.Error()
}

// Unwrap returns the cause.
func (e *DialError) Unwrap() error { return e.Err }
