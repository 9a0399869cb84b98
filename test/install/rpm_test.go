// SPDX-License-Identifier: Apache-2.0

//go:build linux && boot

package install

import (
	"net"
	"os"
	"testing"
)

// TestSystemdRPM takes the rpm through its life: install, start, upgrade, remove. Debian's rpm
// knows none of the packages installed here, so nothing is asked of dependencies.
func TestSystemdRPM(t *testing.T) {
	const rpm = "rpm --nodeps "
	all := listFiles(t)
	// What other packages own, and this small Debian lacks.
	sh(t, "rpm --initdb && mkdir -p /usr/share/doc /usr/share/man/man1 /usr/share/fish/vendor_completions.d /usr/share/zsh/site-functions")
	before := listFiles(t)
	t.Cleanup(func() { // for the other tests, where this one failed
		_, _ = try("rpm -e --nodeps fairlead; rm -rf /etc/fairlead /var/lib/fairlead; systemctl daemon-reload")
	})

	step(t, "install", func(t *testing.T) {
		sh(t, rpm+"-i "+built(t, "old", "fairlead-[0-9]*.rpm"))
		refused(t, "systemctl is-enabled "+service, "disabled")
		if state, _ := try("systemctl is-active " + service); state != "" {
			t.Errorf("the package starts the agent: %s", state)
		}
		sh(t, "rpm -V --nodeps fairlead")
	})
	step(t, "start", func(t *testing.T) {
		sh(t, "systemctl enable --now "+service)
		wantVersion(t, oldVersion)
		l, err := net.Listen("tcp4", "0.0.0.0:8125")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		waitForPort(t, "fairlead ls", 8125, "pending") // no host is there
	})
	config := sh(t, "cat /etc/fairlead/agent.yaml") + "\nlogLevel: debug\n"
	step(t, "upgrade", func(t *testing.T) {
		if err := os.WriteFile("/etc/fairlead/agent.yaml", []byte(config), 0o644); err != nil {
			t.Fatal(err)
		}
		sh(t, "echo kept >/var/lib/fairlead/kept")
		pid := property(t, "MainPID")
		sh(t, rpm+"-U "+built(t, "new", "fairlead-[0-9]*.rpm"))
		wantVersion(t, newVersion)
		if property(t, "MainPID") == pid {
			t.Error("the agent was not restarted")
		}
		if b, err := os.ReadFile("/etc/fairlead/agent.yaml"); err != nil || string(b) != config {
			t.Errorf("%v, agent.yaml is\n%s", err, b)
		}
		sh(t, "systemctl is-enabled "+service+" && test -s /var/lib/fairlead/kept")
	})
	step(t, "remove", func(t *testing.T) {
		sh(t, rpm+"-e fairlead")
		if state := property(t, "LoadState"); state != "not-found" {
			t.Errorf("the unit is %s", state)
		}
		if b, err := os.ReadFile("/etc/fairlead/agent.yaml.rpmsave"); err != nil || string(b) != config {
			t.Errorf("%v, agent.yaml.rpmsave is\n%s", err, b)
		}
		sh(t, "test ! -e /run/fairlead")
		wantFiles(t, before, "/etc/fairlead", "/var/lib/fairlead", "/var/lib/rpm")
		sh(t, "rm -r /etc/fairlead /var/lib/fairlead")
		sh(t, "rmdir --ignore-fail-on-non-empty /usr/share/doc /usr/share/man/man1 /usr/share/man /usr/share/fish/vendor_completions.d /usr/share/fish /usr/share/zsh/site-functions")
		wantFiles(t, all, "/var/lib/rpm") // for the other tests
	})
}
