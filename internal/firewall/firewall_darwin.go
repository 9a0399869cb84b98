// SPDX-License-Identifier: Apache-2.0

package firewall

import (
	"context"
	"os/exec"
	"time"
)

// toolTime is how long socketfilterfw may take.
const toolTime = 5 * time.Second

func readSystem(ctx context.Context) Firewall {
	ctx, cancel := context.WithTimeout(ctx, toolTime)
	defer cancel()
	out, err := exec.CommandContext(ctx, filterTool, "--getglobalstate").Output()
	if err != nil {
		return macFirewall(unknownState)
	}
	return macFirewall(filterState(string(out)))
}
