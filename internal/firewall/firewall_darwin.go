// SPDX-License-Identifier: Apache-2.0

package firewall

import (
	"time"

	"github.com/fairlead/fairlead/internal/port"
)

// check reads nothing: the firewall is by program, and its settings are root's.
func check(port.Slot, bool, time.Duration) Report {
	return Report{
		Text:    "the application firewall of macOS, if it is on, asks or blocks by program, not by port",
		Command: `sudo /usr/libexec/ApplicationFirewall/socketfilterfw --unblockapp "$(command -v fairlead)"`,
	}
}
