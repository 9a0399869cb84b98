// SPDX-License-Identifier: Apache-2.0

//go:build linux && root

package enclave

import (
	"os/exec"
	"testing"
	"time"
)

// An enclave ends though an engine has paused a container in it.
func TestPausedProcessDoesNotHoldTheEnclave(t *testing.T) {
	const pause = `
name=${FAIRLEAD_ENCLAVE_DIR##*/}
cd /sys/fs/cgroup
if [ -e freezer ]; then cd freezer; fi
mkdir -p "$name/c"
sleep 1000 &
echo $! >"$name/c/cgroup.procs"
if [ -e "$name/c/freezer.state" ]; then echo FROZEN >"$name/c/freezer.state"; else echo 1 >"$name/c/cgroup.freeze"; fi
exit 7`
	cmd := exec.Command("/bin/bash", "-ec", pause)
	ended := make(chan error, 1)
	go func() { ended <- Run(cmd) }()
	select {
	case err := <-ended:
		if err == nil {
			t.Error("no exit status")
		}
		if code := cmd.ProcessState.ExitCode(); code != 7 {
			t.Errorf("exit status %d, want 7", code)
		}
	case <-time.After(time.Minute):
		t.Fatal("it has not ended")
	}
}
