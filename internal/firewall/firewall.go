// SPDX-License-Identifier: Apache-2.0

// Package firewall says what the firewall of this system does with connections of other
// machines to a port, as far as it can be read, and which command changes that. It changes
// nothing.
package firewall

import (
	"net/netip"
	"time"

	"github.com/fairlead/fairlead/internal/port"
)

// Report is what the firewall does.
type Report struct {
	Text    string `json:"text"`    // one human-readable line
	Command string `json:"command"` // lets connections in, or shows what decides; empty if none is needed
}

// Check returns what the firewall does with packets of other machines to an address that is
// open for a time.
func Check(protocol port.Protocol, at netip.AddrPort, lasts time.Duration) Report {
	return check(port.Slot{Protocol: protocol, Port: at.Port()}, at.Addr().Is6(), lasts)
}
