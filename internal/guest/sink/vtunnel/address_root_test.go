// SPDX-License-Identifier: Apache-2.0

//go:build linux && root

package vtunnel

import (
	"bytes"
	"fmt"
	"net"
	"os"
	"os/exec"
	"slices"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/testkit/netns"
	"github.com/fairlead/fairlead/internal/testkit/peertest"
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
	r := peertest.NewReceiver(t, "tcp", "127.0.0.1:3041", net.Listen)
	n := peertest.NewTunnel(t, "127.0.0.1:3040", r)
	r.Slow(5 * time.Millisecond)
	rig := peertest.New(t, newSink(t, n.URL()))
	var hosts []string
	for i := range 10 {
		rig.Put(peertest.Pub(t, fmt.Sprintf("tcp 0.0.0.0:%d", 8080+i), fmt.Sprintf("0.0.0.0:%d", 8080+i)))
		hosts = append(hosts, fmt.Sprintf("%d", 8080+i))
	}
	rig.Put(peertest.Pub(t, "tcp 0.0.0.0:9090+", "0.0.0.0:9090"), peertest.Pub(t, "tcp [::]:9090+", "[::]:9090"))
	want := func(address string) {
		t.Helper()
		var all []string
		for _, h := range append(hosts, "9090") {
			all = append(all, h+"/tcp 0.0.0.0 to "+address+":"+h)
		}
		r.Want(all...)
	}
	want("172.27.96.5")
	rig.WantState("tcp 0.0.0.0:8080", port.Active)
	message := `{"remove":false,"ports":{"8080/tcp":[{"HostIp":"0.0.0.0","HostPort":"8080"}]},"connectAddrs":[{"network":"ip+net","addr":"172.27.96.5/20"}]}` + "\n"
	if m := r.Messages(); !slices.Contains(m, message) {
		t.Errorf("messages = %q\nwant among them %q", m, message)
	}
	rig.WantState("tcp 0.0.0.0:9090", port.Active)
	rig.WantReason("tcp [::]:9090", port.Failed, "eth0, which has no IPv6 address")
	for i := range 3 {
		old, address := fmt.Sprintf("172.27.96.%d", 5+i), fmt.Sprintf("172.27.96.%d", 6+i)
		sh(t, fmt.Sprintf(`
/usr/sbin/ip addr del %s/20 dev eth0
/usr/sbin/ip addr add %s/20 dev eth0`, old, address))
		want(address)
	}
	rig.Stop()
	r.Want()
}
