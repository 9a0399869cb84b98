// SPDX-License-Identifier: Apache-2.0

//go:build linux && engines

package engines

import (
	"fmt"
	"net"
	"os"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/status"
)

// wantOwner waits until a port has an owner of that kind and name.
func wantOwner(t testing.TB, c *status.Client, slot string, kind port.OwnerKind, name string) {
	t.Helper()
	eventually(t, func() error {
		l, err := list(c)
		if err != nil {
			return err
		}
		found := false
		for _, p := range l.Publications {
			if p.Key.Slot().String() != slot {
				continue
			}
			found = true
			if p.Owner.Kind != kind || p.Owner.Name != name {
				return fmt.Errorf("%s is owned by %s %q, want %s %q (origins %+v)", p.Key, p.Owner.Kind, p.Owner.Name, kind, name, p.Origins)
			}
		}
		if !found {
			return fmt.Errorf("%s is not there", slot)
		}
		return nil
	})
}

// redirect adds a rule without an owner that sends a TCP port of the guest elsewhere,
// until the test ends.
func redirect(t testing.TB, number, to string) {
	t.Helper()
	rule := []string{"-t", "nat", "-A", "PREROUTING", "-p", "tcp", "-m", "addrtype", "--dst-type", "LOCAL",
		"-m", "tcp", "--dport", number, "-j", "DNAT", "--to-destination", to}
	run(t, "iptables", rule...)
	t.Cleanup(func() {
		rule[2] = "-D"
		_, _ = try("iptables", rule...)
	})
}

// The owner of a container's port is known however the port is opened, and no longer
// once the container has lost it.
func TestDockerOwnerNames(t *testing.T) {
	dockerd(t, "--userland-proxy=false")
	dockerImage(t)
	c := agent(t)
	// A container in the host's network is known by its cgroup alone.
	drun(t, "--name", "host", "--network", "host", "bb", "httpd", "-f", "-p", "8081")
	wantOwner(t, c, "8081/tcp", port.OwnerContainer, "host")
	// A published port is known by the engine's declaration and by its rules.
	drun(t, "--name", "own", "-p", "8000:80", "bb", "httpd", "-f", "-p", "80")
	wantOwner(t, c, "8000/tcp", port.OwnerContainer, "own")
	// A rule of another program is attributed by its target.
	ip := run(t, "docker", "inspect", "-f", "{{.NetworkSettings.IPAddress}}", "own")
	redirect(t, "8099", ip+":80")
	wantOwner(t, c, "8099/tcp", port.OwnerContainer, "own")
	// A plain process is its own owner.
	l, err := net.Listen("tcp4", "127.0.0.1:8082")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	me, err := os.ReadFile("/proc/self/comm")
	if err != nil {
		t.Fatal(err)
	}
	wantOwner(t, c, "8082/tcp", port.OwnerProcess, strings.TrimSpace(string(me)))

	run(t, "docker", "rename", "own", "renamed")
	wantOwner(t, c, "8000/tcp", port.OwnerContainer, "renamed")
	wantOwner(t, c, "8099/tcp", port.OwnerContainer, "renamed")
	run(t, "docker", "rm", "-f", "renamed")
	wantOwner(t, c, "8099/tcp", port.OwnerUnknown, "")
	wantOwner(t, c, "8081/tcp", port.OwnerContainer, "host")
}
