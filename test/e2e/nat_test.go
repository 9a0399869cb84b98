// SPDX-License-Identifier: Apache-2.0

//go:build linux && (root || vm)

package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/testkit/probe"
	"github.com/fairlead/fairlead/test/kit/echo"
)

// sh runs a script in the namespace.
func (s *space) sh(t testing.TB, script string) {
	t.Helper()
	s.feed(t, script, "/bin/sh", "-eus")
}

// feed runs a command with a text as its input in the namespace.
func (s *space) feed(t testing.TB, text string, command ...string) {
	t.Helper()
	var out []byte
	err := s.Do(func() (err error) {
		cmd := exec.Command(command[0], command[1:]...)
		cmd.Stdin = strings.NewReader(text)
		out, err = cmd.CombinedOutput()
		return err
	})
	if err != nil {
		t.Fatalf("%q: %v\n%s\n%.2000s", command, err, out, text)
	}
}

// container is a namespace behind a bridge of the guest.
func container(t *testing.T, guest *space) *space {
	t.Helper()
	c := newSpace(t)
	// A namespace without a name is entered through the file that its handle is.
	// By its path, because busybox's shell has an ip of its own.
	guest.sh(t, fmt.Sprintf(`
/usr/sbin/ip link add br0 type bridge
/usr/sbin/ip addr add 10.88.0.1/24 dev br0
/usr/sbin/ip link set br0 up
/usr/sbin/ip link add veth0 type veth peer name eth0 netns /proc/%d/fd/%d
/usr/sbin/ip link set veth0 master br0 up
echo 1 > /proc/sys/net/ipv4/ip_forward`, os.Getpid(), c.FD()))
	c.sh(t, `
/usr/sbin/ip addr add 10.88.0.2/24 dev eth0
/usr/sbin/ip link set eth0 up
/usr/sbin/ip route add default via 10.88.0.1`)
	return c
}

// A port that exists only as a rule, as CNI portmap and kube-proxy write them.
func TestRuleOnlyPort(t *testing.T) {
	for _, tool := range []struct{ name, add, remove string }{
		{
			"nft", `nft -f - <<'END'
table ip fl { chain pre { type nat hook prerouting priority -100; tcp dport 8081 dnat to 10.88.0.2:80; udp dport 8082 dnat to 10.88.0.2:80; }; }
END`, `nft delete table ip fl`,
		},
		{
			"iptables-nft", `
iptables-nft -w -t nat -A PREROUTING -p tcp --dport 8081 -j DNAT --to-destination 10.88.0.2:80
iptables-nft -w -t nat -A PREROUTING -p udp --dport 8082 -j DNAT --to-destination 10.88.0.2:80`,
			`iptables-nft -w -t nat -F PREROUTING`,
		},
		{
			"iptables-legacy", `
iptables-legacy -w -t nat -A PREROUTING -p tcp --dport 8081 -j DNAT --to-destination 10.88.0.2:80
iptables-legacy -w -t nat -A PREROUTING -p udp --dport 8082 -j DNAT --to-destination 10.88.0.2:80`,
			`iptables-legacy -w -t nat -F PREROUTING`,
		},
	} {
		t.Run(tool.name, func(t *testing.T) {
			r := newRig(t)
			c := container(t, r.guest)
			go echo.Serve(c.listen(t, "tcp4", "0.0.0.0:80"))
			udp := c.listenPacket(t, "udp4", "0.0.0.0:80")
			go echo.ServePackets(udp)
			r.start()
			r.guest.sh(t, tool.add)
			r.wantState("tcp 0.0.0.0:8081", "active")
			r.wantState("udp 0.0.0.0:8082", "active")
			if _, p := r.state("tcp 0.0.0.0:8081"); len(p.Origins) != 1 || p.Origins[0].Source != "nat" || !strings.Contains(p.Origins[0].Detail, "8081") {
				t.Errorf("origins = %+v", p.Origins)
			}
			_ = echoThrough(t, r, "127.0.0.1:8081")
			r.guest.server(t, "conmon", "[::]:8081") // which reserves it as Podman does, for both families
			r.wantState("tcp [::]:8081", "denied")
			r.wantState("tcp 0.0.0.0:8081", "active")
			_ = echoThrough(t, r, "127.0.0.1:8081")
			if err := probe.WantClosed(r.outside.dialer("[::1]:8081")); err != nil {
				t.Error(err)
			}
			r.eventually("an answer over UDP", func() error {
				conn, err := r.outside.Dial("udp", "127.0.0.1:8082")
				if err != nil {
					return err
				}
				defer conn.Close()
				return roundTrip(conn, "datagram")
			})
			r.guest.sh(t, tool.remove)
			r.wantState("tcp 0.0.0.0:8081", "denied")
			r.wantState("udp 0.0.0.0:8082", "")
		})
	}
}
