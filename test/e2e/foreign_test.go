// SPDX-License-Identifier: Apache-2.0

//go:build linux && root

package e2e

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/testkit/enginetest"
	"github.com/fairlead/fairlead/internal/testkit/probe"
	"github.com/fairlead/fairlead/test/kit/echo"
)

// Who may declare ports, by a container's HostIp or a Service's external IP, does not lead
// the host to other machines.
func TestForeignAddressesAreNotPublished(t *testing.T) {
	const id = "4f1e3c0a9b7d2c6e8f5a1b3d7c9e0f2a4b6c8d0e1f3a5b7c9d1e3f5a7b9c0d2e"
	var ports []string
	for _, at := range []string{"169.254.169.254:8000", "198.51.100.2:8001", "198.51.100.2:8002", "198.51.100.1:8003"} {
		host, number, _ := net.SplitHostPort(at)
		ports = append(ports, fmt.Sprintf(`"%s/tcp":[{"HostIp":%q,"HostPort":%q}]`, number, host, number))
	}
	socket := enginetest.Docker(t, fmt.Sprintf(`{"Id":%q,"Name":"/web","Names":["/web"],"State":{"Status":"running","Running":true},`+
		`"Config":{},"HostConfig":{},"NetworkSettings":{"Networks":{},"Ports":{%s}}}`, id, strings.Join(ports, ",")))
	config := filepath.Join(t.TempDir(), "agent.yaml")
	if err := os.WriteFile(config, []byte("rules:\n- {match: {ports: 8002}, action: allow}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	r := newRig(t, "--config", config, "--source", "docker", "--docker-host", socket)
	other := newSpace(t) // another machine of the guest's network
	r.guest.sh(t, fmt.Sprintf(`
/usr/sbin/ip link add lan0 type veth peer name lan1 netns /proc/%d/fd/%d
/usr/sbin/ip addr add 198.51.100.1/24 dev lan0
/usr/sbin/ip link set lan0 up`, os.Getpid(), other.FD()))
	other.sh(t, `
/usr/sbin/ip addr add 198.51.100.2/24 dev lan1
/usr/sbin/ip link set lan1 up`)
	for _, number := range []string{"8001", "8002"} {
		go echo.Serve(other.listen(t, "tcp4", "198.51.100.2:"+number))
	}
	go echo.Serve(r.guest.listen(t, "tcp4", "198.51.100.1:8003"))
	r.start()
	r.wantState("tcp 198.51.100.1:8003", "active") // the guest's own address
	r.wantState("tcp 198.51.100.2:8002", "active") // a rule names the port
	for _, key := range []string{"tcp 169.254.169.254:8000", "tcp 198.51.100.2:8001"} {
		r.wantState(key, "denied")
		if _, p := r.state(key); !strings.Contains(p.Reason, "this machine does not have the address") {
			t.Errorf("%s: reason %q", key, p.Reason)
		}
	}
	for _, number := range []string{"8000", "8001"} {
		if err := probe.WantClosed(r.outside.dialer("127.0.0.1:" + number)); err != nil {
			t.Errorf("port %s of the host: %v", number, err)
		}
	}
	// The address comes.
	other.sh(t, "/usr/sbin/ip addr del 198.51.100.2/24 dev lan1")
	r.guest.sh(t, "/usr/sbin/ip addr add 198.51.100.2/24 dev lan0")
	r.wantState("tcp 198.51.100.2:8001", "active")
}
