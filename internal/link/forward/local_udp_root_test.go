// SPDX-License-Identifier: Apache-2.0

//go:build linux && root

package forward

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/link/own"
	"github.com/fairlead/fairlead/internal/testkit/netns"
)

// An answer leaves from the address that the client sent to: of several of one interface, and
// from a link-local one, which needs its interface.
func TestAnswersToAnotherMachine(t *testing.T) {
	server, client := newSpace(t), newSpace(t)
	configure(t, server, fmt.Sprintf(`
/usr/sbin/ip link add near0 type veth peer name far0 netns /proc/%d/fd/%d
for a in 192.0.2.1/24 192.0.2.2/24 fd00::1/64 fd00::2/64 fe80::1/64 fe80::2/64; do /usr/sbin/ip addr add $a dev near0; done
/usr/sbin/ip link set near0 addrgenmode none up`, os.Getpid(), client.FD()))
	configure(t, client, `
for a in 192.0.2.9/24 fd00::9/64 fe80::9/64; do /usr/sbin/ip addr add $a dev far0; done
/usr/sbin/ip link set far0 addrgenmode none up`)
	var far *net.Interface
	var pc *own.UDPConn
	err := client.Do(func() (err error) { far, err = net.InterfaceByName("far0"); return err })
	if err == nil {
		err = server.Do(func() (err error) { pc, err = new(own.Sockets).ListenPacket(t.Context(), "udp", "[::]:0"); return err })
	}
	if err != nil {
		t.Fatal(err)
	}
	p := echoAt(t, pc)
	zone := fmt.Sprint("%", far.Index)
	for _, at := range []string{"192.0.2.1", "192.0.2.2", "fd00::1", "fd00::2", "fe80::1" + zone, "fe80::2" + zone} {
		conn, err := client.Dial("udp", net.JoinHostPort(at, fmt.Sprint(p)))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		_ = conn.SetDeadline(time.Now().Add(patience))
		for i := range 2 {
			want := fmt.Sprint(at, " ", i)
			b := make([]byte, 64)
			_, err := conn.Write([]byte(want))
			if err == nil {
				var n int
				n, err = conn.Read(b)
				b = b[:n]
			}
			if err != nil || string(b) != want {
				t.Errorf("%s answers %q, %v", at, b, err)
			}
		}
	}
}

func newSpace(t *testing.T) *netns.Space {
	t.Helper()
	s, err := netns.New()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

// configure runs a script in a namespace, in which addresses can be used at once.
func configure(t *testing.T, s *netns.Space, script string) {
	t.Helper()
	var out []byte
	err := s.Do(func() (err error) {
		script = "echo 0 > /proc/sys/net/ipv6/conf/default/accept_dad; for d in /proc/sys/net/ipv6/conf/*/accept_dad; do echo 0 > $d; done" + script
		out, err = exec.Command("/bin/sh", "-ec", script).CombinedOutput()
		return err
	})
	if err != nil {
		t.Fatalf("%v: %s\n%s", err, out, script)
	}
}
