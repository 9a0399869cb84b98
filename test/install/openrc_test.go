// SPDX-License-Identifier: Apache-2.0

//go:build linux && boot

package install

import (
	"net"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/fairlead/fairlead/internal/testkit/wait"
)

// TestOpenRCService takes the agent of an archive through its life under OpenRC: install,
// start, reload, restart after a crash, update, uninstall.
func TestOpenRCService(t *testing.T) {
	const program = "/usr/local/bin/fairlead"
	before := listFiles(t)
	installArchive(t, "old")
	pid := 0
	step(t, "install", func(t *testing.T) {
		t.Log(sh(t, "fairlead agent install -- --log-level debug"))
		wantVersion(t, oldVersion)
		sh(t, "rc-service fairlead-agent status && rc-update show default | grep fairlead-agent")
		pid = agentPID(t, program, 0)
		limits := sh(t, "cat /proc/"+strconv.Itoa(pid)+"/limits")
		if i := strings.Index(limits, "Max open files"); i < 0 || !strings.HasPrefix(strings.TrimSpace(limits[i+len("Max open files"):]), "65536 ") {
			t.Errorf("limits:\n%s", limits)
		}
		wantDoctor(t, "fairlead doctor -v", noHost)
		l, err := net.Listen("tcp4", "0.0.0.0:8123")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		waitForPort(t, "fairlead ls", 8123, "pending") // no host is there
		t.Log(sh(t, "fairlead ls"))
	})
	step(t, "reload", func(t *testing.T) {
		if err := os.MkdirAll("/etc/fairlead", 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile("/etc/fairlead/agent.yaml", []byte("rules:\n- match: {ports: 8124}\n  action: deny\n"), 0o644); err != nil {
			t.Fatal(err)
		}
		sh(t, "rc-service fairlead-agent reload")
		l, err := net.Listen("tcp4", "0.0.0.0:8124")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		waitForPort(t, "fairlead ls", 8124, "denied")
	})
	step(t, "crash", func(t *testing.T) {
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		agentPID(t, program, pid)
		wantVersion(t, oldVersion)
	})
	step(t, "update", func(t *testing.T) {
		installArchive(t, "new")
		sh(t, "rc-service fairlead-agent restart")
		wantVersion(t, newVersion)
	})
	step(t, "uninstall", func(t *testing.T) {
		t.Log(sh(t, "fairlead agent uninstall"))
		wait.Until(t, "the agent has ended", func() error {
			_, err := try("! pgrep -f '^" + program + " agent'")
			return err
		})
		refused(t, "rc-service fairlead-agent status", "does not exist")
		wantFiles(t, before, program, "/etc/fairlead", "/var/lib/fairlead")
		sh(t, "rm -rf "+program+" /etc/fairlead /var/lib/fairlead")
	})
	// As the apk package installs it, which has the program elsewhere.
	step(t, "script as it is shipped", func(t *testing.T) {
		installArchive(t, "new")
		sh(t, "tar -C /etc/init.d --strip-components 2 -xzf "+built(t, "new", "*.tar.gz")+" --wildcards '*/openrc/fairlead-agent'")
		sh(t, "rc-service fairlead-agent start")
		wantVersion(t, newVersion)
		refused(t, "fairlead agent install", "was not written by this command")
		sh(t, "rc-service fairlead-agent stop && rm -rf /etc/init.d/fairlead-agent "+program+" /var/lib/fairlead")
		wantFiles(t, before)
	})
}
