// SPDX-License-Identifier: Apache-2.0

//go:build linux && root

package e2e

import (
	"errors"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/test/kit/probe"
)

// `fairlead doctor --host` names what is open to other machines and refused by the firewall,
// with a command that lets them in. The command does.
func TestDoctorNamesWhatTheFirewallRefuses(t *testing.T) {
	const lan, command = "192.0.2.10:8080", "sudo nft insert rule inet filter input tcp dport 8080 accept"
	r := newRig(t)
	r.hostFlags = []string{"--bind", "all"}
	r.outside.sh(t, lanOf)
	r.start()
	doctor := func(wants ...string) {
		t.Helper()
		r.eventually(strings.Join(wants, "; "), func() error {
			var out string
			if err := r.outside.Do(func() error {
				out, _, _ = fairlead(t, "doctor", "--host", "--config", "/dev/null", "--control", r.hostCtl)
				return nil
			}); err != nil {
				return err
			}
			for _, w := range wants {
				if !strings.Contains(strings.Join(strings.Fields(out), " "), w) {
					return errors.New(out)
				}
			}
			return nil
		})
	}
	doctor("ok firewall input nothing is open wider than loopback; no firewall rule of this system (nftables, iptables)")
	go echoServer(r.guest.listen(t, "tcp4", "0.0.0.0:8080"))
	r.wantState("tcp 0.0.0.0:8080", "active")
	doctor("ok firewall input open to other machines: 8080/tcp at 0.0.0.0; no firewall rule")

	r.outside.sh(t, "nft add table inet filter")
	r.outside.sh(t, "nft 'add chain inet filter input { type filter hook input priority 0; policy drop; }'")
	r.outside.sh(t, "nft add rule inet filter input iifname lo accept")
	doctor("warn firewall input 8080/tcp at 0.0.0.0 is open to other machines, but the firewall refuses them (chain inet filter input)", "→ "+command)

	r.outside.sh(t, strings.TrimPrefix(command, "sudo "))
	doctor("ok firewall input open to other machines: 8080/tcp at 0.0.0.0; the firewall lets them in (chain inet filter input)")
	if err := probe.Want(probe.Data, r.outside.dialer(lan), "hello"); err != nil {
		t.Error(err)
	}
}
