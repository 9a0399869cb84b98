// SPDX-License-Identifier: Apache-2.0

package firewall

import (
	"context"
	"os/exec"
	"syscall"
	"time"

	"golang.org/x/sys/windows"

	"github.com/fairlead/fairlead/internal/trust"
)

// toolTime is how long netsh may take.
const toolTime = 5 * time.Second

func readSystem(ctx context.Context) Firewall {
	netsh, err := trust.Find("netsh.exe")
	if err != nil {
		return windowsFirewall(unknownState, nil)
	}
	ctx, cancel := context.WithTimeout(ctx, toolTime)
	defer cancel()
	cmd := exec.CommandContext(ctx, netsh, "advfirewall", "show", "currentprofile", "state")
	cmd.SysProcAttr = &syscall.SysProcAttr{HideWindow: true, CreationFlags: windows.CREATE_NO_WINDOW}
	out, err := cmd.Output()
	if err != nil {
		return windowsFirewall(unknownState, nil)
	}
	return windowsFirewall(netshState(string(out)))
}
