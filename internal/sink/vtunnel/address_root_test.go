// SPDX-License-Identifier: Apache-2.0

//go:build linux && root

package vtunnel

import (
	"bytes"
	"net"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/test/kit/netns"
	"github.com/fairlead/fairlead/test/kit/peertest"
)

// inside is set in the process that runs a test in a namespace of its own.
const inside = "FAIRLEAD_TEST_INSIDE"

// alone runs the test again in a process in a network namespace of its own, and
// reports whether this is that process.
func alone(t *testing.T) bool {
	t.Helper()
	if os.Getenv(inside) != "" {
		return true
	}
	space, err := netns.New()
	if err != nil {
		t.Fatal(err)
	}
	defer space.Close()
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^"+t.Name()+"$", "-test.v")
	cmd.Env = append(os.Environ(), inside+"=1")
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := space.Start(cmd); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("%v\n%s", err, out.String())
	}
	return false
}

func sh(t *testing.T, script string) {
	t.Helper()
	if out, err := exec.Command("/bin/sh", "-euc", script).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}

// Rancher Desktop's agent reads the addresses of eth0 once, at its start.
func TestChangedInterfaceAddressIsSent(t *testing.T) {
	if !alone(t) {
		return
	}
	sh(t, `
/usr/sbin/ip link add eth0 type veth peer name far0
echo 1 > /proc/sys/net/ipv6/conf/eth0/disable_ipv6
/usr/sbin/ip addr add 172.27.96.5/20 dev eth0
/usr/sbin/ip link set eth0 up`)
	r := peertest.NewReceiver(t, "tcp", "127.0.0.1:3040", net.Listen)
	rig := peertest.New(t, newSink(t, r.URL()))
	rig.Put(peertest.Pub(t, "tcp 0.0.0.0:8080", "0.0.0.0:8080"), peertest.Pub(t, "tcp [::]:9090+", "0.0.0.0:9090", "[::]:9090"))
	r.Want("8080/tcp 0.0.0.0 to 172.27.96.5:8080", "9090/tcp 0.0.0.0 to 172.27.96.5:9090")
	rig.WantState("tcp 0.0.0.0:8080", port.Active)
	want := `{"remove":false,"ports":{"8080/tcp":[{"HostIp":"0.0.0.0","HostPort":"8080"}],"9090/tcp":[{"HostIp":"0.0.0.0","HostPort":"9090"}]},"connectAddrs":[{"network":"ip+net","addr":"172.27.96.5/20"}]}` + "\n"
	if m := r.Messages(); len(m) == 0 || m[len(m)-1] != want {
		t.Errorf("messages = %q\nwant last  %q", m, want)
	}
	for _, o := range rig.Outcomes("tcp [::]:9090") {
		if o.HostAddress.Addr().Is6() && (o.State != port.Failed || !strings.Contains(o.Reason, "eth0, which has no IPv6 address")) {
			t.Errorf("%+v", o)
		}
	}
	sh(t, `
/usr/sbin/ip addr del 172.27.96.5/20 dev eth0
/usr/sbin/ip addr add 172.19.240.9/20 dev eth0`)
	r.Want("8080/tcp 0.0.0.0 to 172.19.240.9:8080", "9090/tcp 0.0.0.0 to 172.19.240.9:9090")
	rig.Stop()
	r.Want()
}
