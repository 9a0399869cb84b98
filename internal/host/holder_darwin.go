// SPDX-License-Identifier: Apache-2.0

package host

import (
	"bytes"
	"context"
	"fmt"
	"os/exec"
	"time"
)

func systemHolders() HolderFinder { return lsofHolders{} }

// lsofHolders runs lsof, which is part of macOS. Only root sees the sockets of other
// users' processes.
type lsofHolders struct{}

// Holders implements HolderFinder.
func (lsofHolders) Holders(ctx context.Context, sockets []Socket) (map[Socket]Holder, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, "/usr/sbin/lsof", "-nP", "-w", "-FpcPtn", "-iTCP", "-sTCP:LISTEN", "-iUDP")
	out, err := cmd.Output() // status 1 also says that some files were not found
	if err != nil && len(out) == 0 {
		return nil, fmt.Errorf("lsof: %w", err)
	}
	return lsofFind(bytes.NewReader(out), sockets)
}
