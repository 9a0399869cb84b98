// SPDX-License-Identifier: Apache-2.0

//go:build linux && root

package packets

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/status"
	"github.com/fairlead/fairlead/internal/testkit/netns"
	"github.com/fairlead/fairlead/test/kit/program"
)

// family has the addresses of a world.
type family struct {
	name        string
	v6          bool
	nodes       [2]string // the guest's own, on the default route's interface; REDIRECT leads to the second
	more, asked string    // a network with many more of its own, and the one of these that is asked
	uplink      string    // network of eth0
	neighbour   string    // a client outside, whom rules may name as source
	stranger    string    // a client outside that no rule names, behind the neighbour
	near        string    // a network of the neighbour and of both nodes
	servers     [4]string // behind the guest
	behind      string    // their network
	loopback    string
}

var families = map[string]family{
	"IPv4": {
		name: "ip", nodes: [2]string{"192.0.2.2", "192.0.2.3"}, uplink: "192.0.2.0/24",
		neighbour: "192.0.2.1", stranger: "203.0.113.9", near: "192.0.2.0/29",
		more: "192.0.2.64/27", asked: "192.0.2.70",
		servers: [4]string{"10.9.0.2", "10.9.0.3", "10.9.0.4", "10.9.0.5"}, behind: "10.9.0.0/24", loopback: "127.0.0.1",
	},
	"IPv6": {
		name: "ip6", v6: true, nodes: [2]string{"2001:db8::2", "2001:db8::3"}, uplink: "2001:db8::/64",
		neighbour: "2001:db8::1", stranger: "2001:db8:9::9", near: "2001:db8::/125",
		more: "2001:db8::40/123", asked: "2001:db8::46",
		servers: [4]string{"fd09::2", "fd09::3", "fd09::4", "fd09::5"}, behind: "fd09::/64", loopback: "::1",
	},
}

// Ports of the servers. Each also serves the ports that clients ask for, as a
// rule need not change the port.
var serverPorts = []uint16{80, 81, 9000, 9001, 9002}

// Ports of servers in the guest itself, which REDIRECT leads to.
const (
	everywherePort = 7000 // on all addresses
	loopbackPort   = 7001 // on the loopback alone
	nodePort       = 7002 // on the node address alone that REDIRECT leads to
)

// The ports that rules are about and clients ask for.
const firstPort, lastPort = 1001, 1010

// world is a guest with an agent, servers behind it, a client outside, and a
// host with a host peer.
type world struct {
	t testing.TB
	family
	guest, outside, behind, host *netns.Space
	dir, binary                  string
	agentCtl                     string

	mu     sync.Mutex
	active map[port.Key]bool // what the agent has open on the host
	change chan struct{}     // closed at the next change
}

func newWorld(t testing.TB, f family, binary string) *world {
	t.Helper()
	w := &world{t: t, family: f, binary: binary, dir: t.TempDir(), active: map[port.Key]bool{}, change: make(chan struct{})}
	for _, s := range []**netns.Space{&w.guest, &w.outside, &w.behind, &w.host} {
		n, err := netns.New()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = n.Close() })
		*s = n
	}
	w.sh(w.guest, fmt.Sprintf(`
/usr/sbin/ip link add eth0 type veth peer name eth0 netns /proc/%[1]d/fd/%[2]d
/usr/sbin/ip link add srv0 type veth peer name eth0 netns /proc/%[1]d/fd/%[3]d
/usr/sbin/ip link add docker0 type bridge
/usr/sbin/ip addr add 192.0.2.3/24 dev eth0
/usr/sbin/ip addr add 192.0.2.2/24 dev eth0
for i in $(seq 64 95); do
	/usr/sbin/ip addr add 192.0.2.$i/24 dev eth0
	/usr/sbin/ip addr add 2001:db8::$(printf %%x $i)/64 dev eth0 nodad
done
/usr/sbin/ip addr add 2001:db8::2/64 dev eth0 nodad
/usr/sbin/ip addr add 2001:db8::3/64 dev eth0 nodad
/usr/sbin/ip addr add 10.9.0.1/24 dev srv0
/usr/sbin/ip addr add fd09::1/64 dev srv0 nodad
/usr/sbin/ip addr add 172.17.0.1/16 dev docker0
for d in eth0 srv0 docker0; do /usr/sbin/ip link set $d up; done
echo 1 >/proc/sys/net/ipv4/ip_forward
echo 1 >/proc/sys/net/ipv6/conf/all/forwarding`, os.Getpid(), w.outside.FD(), w.behind.FD()))
	w.sh(w.outside, `
/usr/sbin/ip addr add 192.0.2.1/24 dev eth0
/usr/sbin/ip addr add 2001:db8::1/64 dev eth0 nodad
/usr/sbin/ip addr add 203.0.113.9/32 dev eth0
/usr/sbin/ip addr add 2001:db8:9::9/128 dev eth0 nodad
/usr/sbin/ip link set eth0 up
/usr/sbin/ip route add default via 192.0.2.2
/usr/sbin/ip -6 route add default via 2001:db8::2`)
	w.sh(w.behind, `
for i in 2 3 4 5; do
	/usr/sbin/ip addr add 10.9.0.$i/24 dev eth0
	/usr/sbin/ip addr add fd09::$i/64 dev eth0 nodad
done
/usr/sbin/ip link set eth0 up
/usr/sbin/ip route add default via 10.9.0.1
/usr/sbin/ip -6 route add default via fd09::1`)
	w.sh(w.guest, `
/usr/sbin/ip route add default via 192.0.2.1
/usr/sbin/ip -6 route add default via 2001:db8::1`)
	w.serve()
	w.start()
	return w
}

func (w *world) sh(s *netns.Space, script string) {
	w.t.Helper()
	if out, err := w.try(s, script, "/bin/sh", "-eus"); err != nil {
		w.t.Fatalf("%v\n%s\n%s", err, out, script)
	}
}

// try runs a command with an input in a namespace.
func (w *world) try(s *netns.Space, stdin string, command ...string) (out []byte, err error) {
	err = s.Do(func() (err error) {
		cmd := exec.Command(command[0], command[1:]...)
		cmd.Stdin = strings.NewReader(stdin)
		out, err = cmd.CombinedOutput()
		return err
	})
	return out, err
}

// serve starts all servers.
func (w *world) serve() {
	w.t.Helper()
	ports := append([]uint16(nil), serverPorts...)
	for p := uint16(firstPort); p <= lastPort; p++ {
		ports = append(ports, p)
	}
	for _, a := range w.servers {
		for _, p := range ports {
			w.identify(w.behind, a, p, serverName(a, p))
		}
	}
	for _, a := range []string{w.loopback, w.nodes[0], w.nodes[1]} {
		w.identify(w.guest, a, everywherePort, "the guest's own everywhere")
	}
	w.identify(w.guest, w.loopback, loopbackPort, "the guest's own at the loopback")
	w.identify(w.guest, w.nodes[1], nodePort, "the guest's own at "+w.nodes[1])
}

// serverName is what a server behind the guest answers.
func serverName(address string, p uint16) string { return fmt.Sprintf("%s port %d", address, p) }

// identify has a server answer each client with its name.
func (w *world) identify(s *netns.Space, address string, p uint16, name string) {
	w.t.Helper()
	at := netip.AddrPortFrom(netip.MustParseAddr(address), p).String()
	l, err := s.Listen("tcp", at)
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = io.WriteString(c, name)
			_ = c.Close()
		}
	}()
	u, err := s.ListenPacket("udp", at)
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { _ = u.Close() })
	go func() {
		b := make([]byte, 64)
		for {
			_, from, err := u.ReadFrom(b)
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err == nil {
				_, _ = u.WriteTo([]byte(name), from)
			}
		}
	}()
}

const (
	metricsAddr = "127.0.0.1:9464" // where the agent exports metrics, in the guest
	maxPorts    = 100              // that one rule may publish
)

// start runs the agent in the guest and the host peer on the host.
func (w *world) start() {
	w.t.Helper()
	link := "unix://" + filepath.Join(w.dir, "link", "s")
	w.agentCtl = filepath.Join(w.dir, "agent", "s")
	w.run(w.guest, "agent", "--link", link, "--control", w.agentCtl, "--source", "nat", "--hold-down", "0",
		"--metrics-addr", metricsAddr, "--nat-max-ports", strconv.Itoa(maxPorts))
	w.run(w.host, "host", "--connect", link, "--control", filepath.Join(w.dir, "host", "s"))
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	w.t.Cleanup(func() { cancel(); <-done })
	go func() {
		defer close(done)
		w.follow(ctx)
	}()
}

// run starts fairlead in a namespace; it is killed when the test ends.
func (w *world) run(s *netns.Space, args ...string) {
	w.t.Helper()
	program.Start(w.t, program.Command{Cmd: exec.Command(w.binary, args...), Name: args[0], In: s})
}

// follow keeps active equal to what the agent reports, which is after the host
// peer has opened a port.
func (w *world) follow(ctx context.Context) {
	for ctx.Err() == nil {
		_ = status.NewClient(w.agentCtl).Watch(ctx, func(e status.Event) error {
			w.mu.Lock()
			defer w.mu.Unlock()
			if e.Publication != nil {
				w.active[e.Publication.Key] = e.Publication.State == port.Active && e.Type != status.Gone
			}
			close(w.change)
			w.change = make(chan struct{})
			return nil
		})
		select {
		case <-ctx.Done():
		case <-time.After(50 * time.Millisecond): // it is about to start
		}
	}
}

// limit is how long what must come may take; only a failure reaches it.
const limit = 2 * time.Minute

// await waits until a port is open on the host, or withdrawn.
func (w *world) await(k port.Key, open bool) error {
	timeout := time.After(limit)
	for {
		w.mu.Lock()
		is, change := w.active[k], w.change
		w.mu.Unlock()
		if is == open {
			return nil
		}
		select {
		case <-change:
		case <-timeout:
			return fmt.Errorf("on the host %s is not open=%v within %v", k, open, limit)
		}
	}
}

// ask connects from a namespace and returns which server answered, "" if none did.
// source is the client's address, "" for what the route prefers.
func ask(s *netns.Space, source, network, address string, patience time.Duration) (server string) {
	_ = s.Do(func() error {
		d := net.Dialer{Timeout: patience, LocalAddr: localAddr(network, source)}
		c, err := d.Dial(network, address)
		if err != nil {
			return err
		}
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(patience))
		if network == "udp" {
			_, _ = io.WriteString(c, "?")
		}
		b := make([]byte, 64)
		n, _ := c.Read(b)
		server = string(b[:n])
		return nil
	})
	return server
}

// localAddr returns an address to dial from, nil if source is "".
func localAddr(network, source string) net.Addr {
	switch ip := net.ParseIP(source); {
	case ip == nil:
		return nil
	case network == "udp":
		return &net.UDPAddr{IP: ip}
	default:
		return &net.TCPAddr{IP: ip}
	}
}
