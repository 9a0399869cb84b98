// SPDX-License-Identifier: Apache-2.0

//go:build linux && (root || vm)

package e2e

import (
	"fmt"
	"strings"
	"syscall"
	"testing"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/status"
)

// A port that a rule redirects to another port of the guest is owned by the listener
// there, on both sides and as long as it listens.
func TestRedirectedPortOwner(t *testing.T) {
	for _, tool := range []struct{ name, add string }{
		{"nft", `nft 'add table ip fl; add chain ip fl pre { type nat hook prerouting priority -100; }; add rule ip fl pre tcp dport 8081 redirect to :9090'`},
		{"iptables-nft", `iptables-nft -w -t nat -A PREROUTING -p tcp --dport 8081 -j REDIRECT --to-ports 9090`},
		{"iptables-legacy", `iptables-legacy -w -t nat -A PREROUTING -p tcp --dport 8081 -j REDIRECT --to-ports 9090`},
	} {
		t.Run(tool.name, func(t *testing.T) {
			r := newRig(t).start()
			const key = "tcp 0.0.0.0:8081"
			wantOwner := func(name string, pid int) {
				t.Helper()
				var want port.Owner
				if name != "" {
					want.Name, want.ID = name, fmt.Sprint(pid)
				}
				for side, control := range map[string]string{"agent": r.agentCtl, "host": r.hostCtl} {
					r.eventually(fmt.Sprintf("the %s says that %q owns %s", side, name, key), func() error {
						out, _, _ := fairlead(t, "ls", "-o", "json", "--control", control)
						for _, p := range decode[status.List](t, out).Publications {
							if p.Key.String() != key {
								continue
							}
							if p.Owner.Name == want.Name && p.Owner.ID == want.ID {
								return nil
							}
							return fmt.Errorf("it is %+v", p.Owner)
						}
						return fmt.Errorf("it is not there")
					})
				}
			}
			r.guest.sh(t, tool.add)
			r.wantState(key, "active")
			wantOwner("", 0)
			pid := r.guest.server(t, "web-server", "0.0.0.0:9090")
			wantOwner("web-server", pid)
			out, _, _ := fairlead(t, "ls", "--control", r.agentCtl)
			named := 0
			for line := range strings.Lines(out) {
				if strings.HasPrefix(line, "8081/tcp") && strings.Contains(line, "web-server") {
					named++
				}
			}
			if named != 1 {
				t.Errorf("ls does not name the server of 8081:\n%s", out)
			}
			if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
			wantOwner("", 0)
			wantOwner("other", r.guest.server(t, "other", "127.0.0.1:9090"))
		})
	}
}
