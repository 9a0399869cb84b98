// SPDX-License-Identifier: Apache-2.0

package firewall

import (
	"fmt"
	"strings"
	"time"

	"github.com/fairlead/fairlead/internal/port"
)

// check reads nothing: the rules depend on the network's profile and on the program.
func check(slot port.Slot, _ bool, _ time.Duration) Report {
	return Report{
		Text: "Windows Defender Firewall blocks connections of other machines unless a rule allows them; as administrator",
		Command: fmt.Sprintf(`netsh advfirewall firewall add rule name="fairlead %s" dir=in action=allow protocol=%s localport=%d`,
			slot, strings.ToUpper(slot.Protocol.String()), slot.Port),
	}
}
