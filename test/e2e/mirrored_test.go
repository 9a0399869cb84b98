// SPDX-License-Identifier: Apache-2.0

//go:build linux && (root || vm)

package e2e

import (
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/testkit/kernels"
)

// Connections of Windows come from these ports.
const windowsFirst, windowsLast = 30_000, 30_999

// mirrored is the network of WSL's mirrored mode as its NetworkManager.cpp makes it: the
// addresses of Windows, and interfaces to which TCP and UDP to them are routed, even those of
// the guest itself. What comes in by these interfaces is delivered. All have the address of
// the gateway, so that what is sent out can be taken in as it is.
const mirrored = `
ip() { /usr/sbin/ip "$@"; }
gateway=169.254.73.152 mac=00:11:22:33:44:55
echo 0 > /proc/sys/net/ipv4/conf/all/rp_filter
ip rule add lookup local pref 2
ip rule del lookup local pref 0
for i in loopback0 eth0; do
	echo 1 > /proc/sys/net/ipv4/conf/$i/accept_local
	echo 1 > /proc/sys/net/ipv4/conf/$i/route_localnet
	echo 0 > /proc/sys/net/ipv4/conf/$i/rp_filter
	ip link set $i address $mac up
	ip neigh add $gateway lladdr $mac dev $i nud permanent
	for p in tcp udp; do ip rule add iif $i ipproto $p lookup local pref 0; done
done
ip addr add 192.168.1.20/24 dev eth0
ip route add default via 192.168.1.1
ip route add 127.0.0.1 via $gateway dev loopback0 src 127.0.0.1 onlink table 127
ip route add 192.168.1.20 via $gateway dev eth0 src 192.168.1.20 onlink table 128
for p in tcp udp; do
	ip rule add ipproto $p lookup 127 pref 1
	ip rule add ipproto $p lookup 128 pref 1
done
`

// mirror gives a guest the network of WSL's mirrored mode. The namespace that it returns is
// Windows: TCP and UDP packets to its ports go there, and all others back into the guest.
func (s *space) mirror(t *testing.T) (windows *space) {
	t.Helper()
	windows = newSpace(t)
	for _, name := range []string{"loopback0", "eth0"} {
		inGuest, inWindows := s.tap(t, name), windows.tap(t, name)
		var wg sync.WaitGroup
		wg.Go(func() {
			carryFrames(inGuest, func(frame []byte) *os.File {
				if port := destinationPort(frame); windowsFirst <= port && port <= windowsLast {
					return inWindows
				}
				return inGuest
			})
		})
		wg.Go(func() { carryFrames(inWindows, func([]byte) *os.File { return inGuest }) })
		t.Cleanup(func() {
			_, _ = inGuest.Close(), inWindows.Close()
			wg.Wait()
		})
	}
	s.sh(t, mirrored)
	windows.sh(t, mirrored+fmt.Sprintf("echo %d %d > /proc/sys/net/ipv4/ip_local_port_range\n", windowsFirst, windowsLast))
	return windows
}

// tap makes an Ethernet interface whose frames are read from and written to the file.
func (s *space) tap(t *testing.T, name string) (f *os.File) {
	t.Helper()
	if err := s.Do(func() error {
		fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		interf, err := unix.NewIfreq(name)
		if err == nil {
			interf.SetUint16(unix.IFF_TAP | unix.IFF_NO_PI)
			err = unix.IoctlIfreq(fd, unix.TUNSETIFF, interf)
		}
		f = os.NewFile(uintptr(fd), name)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	return f
}

// carryFrames reads Ethernet frames and writes those with IPv4 to where they belong, until
// the file is closed.
func carryFrames(from *os.File, to func(frame []byte) *os.File) {
	b := make([]byte, 1<<16)
	for {
		n, err := from.Read(b)
		if err != nil {
			return
		}
		if frame := b[:n]; destinationPort(frame) != 0 {
			_, _ = to(frame).Write(frame)
		}
	}
}

// destinationPort returns that of a frame with TCP or UDP over IPv4, and 0 for any other.
func destinationPort(frame []byte) uint16 {
	const ethernet = 14
	if len(frame) < ethernet+20 || bigEndian(frame[12:]) != unix.ETH_P_IP {
		return 0
	}
	ip := frame[ethernet:]
	header := int(ip[0]&0xf) * 4
	if !slices.Contains([]byte{unix.IPPROTO_TCP, unix.IPPROTO_UDP}, ip[9]) || len(ip) < header+4 {
		return 0
	}
	return bigEndian(ip[header+2:])
}

func bigEndian(b []byte) uint16 { return uint16(b[0])<<8 | uint16(b[1]) }

// reaches asks a server at an address from the namespace, until the answer is the one that is
// wanted.
func (r *rig) reaches(from *space, addr, want string) {
	r.t.Helper()
	r.eventually(fmt.Sprintf("%s answers %q", addr, want), func() error {
		got, err := from.ask(addr)
		if err == nil && got != want {
			err = fmt.Errorf("answer %q", got)
		}
		return err
	})
}

// ask connects, sends a line and its end, and returns the answer, all within a short while.
func (s *space) ask(addr string) (string, error) {
	var b []byte
	err := s.Do(func() error {
		d := net.Dialer{Timeout: time.Second}
		c, err := d.Dial("tcp4", addr)
		if err != nil {
			return err
		}
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(5 * time.Second))
		if _, err := io.WriteString(c, "hello\n"); err != nil {
			return err
		}
		if err := c.(*net.TCPConn).CloseWrite(); err != nil {
			return err
		}
		b, err = io.ReadAll(c)
		return err
	})
	return string(b), err
}

// keepLocal is what docs/wsl.md gives for rules of others, which a placeholder does not avoid.
const keepLocal = `nft 'table ip wsl-loopback { chain pre { type nat hook prerouting priority -101; iif "loopback0" ip daddr 127.0.0.1 dnat to 127.0.0.1; }; }'`

func TestKeepLocalIsDocumented(t *testing.T) {
	if os.Getenv(kernels.Variable) != "" {
		return // documents are not in the machine
	}
	if b, err := os.ReadFile("../../docs/wsl.md"); err != nil || !strings.Contains(string(b), keepLocal) {
		t.Errorf("docs/wsl.md lacks %s, error %v", keepLocal, err)
	}
}

// In mirrored mode connections to 127.0.0.1, those of the guest as well, come in by an interface,
// where the prerouting rules of Docker and CNI match those that are not tracked yet.
func TestMirroredMode(t *testing.T) {
	r := newRig(t, "--sink", "listener", "--listener-settle", "100ms")
	pod := container(t, r.guest)
	go answer(pod.listen(t, "tcp4", "0.0.0.0:80"), "pod")
	windows := r.guest.mirror(t)
	everywhere := func(addr, want string) {
		t.Helper()
		r.reaches(windows, addr, want)
		r.reaches(r.guest, addr, want)
	}
	r.startAgent()
	go answer(r.guest.listen(t, "tcp4", "127.0.0.1:7001"), "server")
	r.wantState("tcp 127.0.0.1:7001", "active")
	everywhere("127.0.0.1:7001", "server got hello\n")
	r.guest.sh(t, ruleTo8081)

	r.wantState("tcp 0.0.0.0:8081", "active")
	everywhere("127.0.0.1:8081", "pod got hello\n")

	// Also behind a firewall.
	r.guest.sh(t, `nft 'table inet fw { chain in { type filter hook input priority 0; ct state invalid drop; }; }'`)
	everywhere("127.0.0.1:8081", "pod got hello\n")

	// A rule before a server.
	go answer(r.guest.listen(t, "tcp4", "0.0.0.0:8083"), "server")
	r.guest.sh(t, `nft 'table ip docker { chain pre { type nat hook prerouting priority -100; tcp dport 8083 dnat to 10.88.0.2:80; }; }'`)
	r.wantState("tcp 0.0.0.0:8083", "active")
	r.reaches(r.guest, "127.0.0.1:8083", "server got hello\n")
	if got, err := windows.ask("127.0.0.1:8083"); err == nil {
		t.Errorf("the rule did not take the connection: %q", got)
	}
	r.guest.sh(t, keepLocal)
	everywhere("127.0.0.1:8083", "server got hello\n")

	// The end of a placeholder.
	r.guest.sh(t, "nft delete table ip fl")
	r.wantState("tcp 0.0.0.0:8081", "")
	for _, from := range []*space{windows, r.guest} {
		r.eventually("it is closed", func() error {
			if got, err := from.ask("127.0.0.1:8081"); err == nil {
				return fmt.Errorf("answer %q", got)
			}
			return nil
		})
	}
}
