// SPDX-License-Identifier: Apache-2.0

//go:build linux

package cluster

import (
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"

	"github.com/fairlead/fairlead/internal/testkit/netns"
)

// Says is the answer of a Pod to each client, and PodPort its port.
const (
	Says    = "hello from the pod"
	PodPort = 8080
)

// Pod is a network namespace with a server on PodPort, tcp and udp, on its node's
// network.
type Pod struct {
	node, space *netns.Space
	tcp         net.Listener
	udp         net.PacketConn
}

// NewPod makes a pod with an address in a node's namespace, which is this program's
// own where node is nil, behind a bridge that has the address gateway. The caller
// closes it.
func NewPod(node *netns.Space, bridge, gateway, addr string) (_ *Pod, err error) {
	p := &Pod{node: node}
	if p.space, err = netns.New(); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			p.Close()
		}
	}()
	err = within(node, func() error {
		return ip("link add pod0 type veth peer name podpeer", "link set pod0 master "+bridge+" up",
			fmt.Sprintf("link set podpeer netns /proc/%d/fd/%d", os.Getpid(), p.space.FD()))
	})
	if err != nil {
		return nil, err
	}
	err = p.space.Do(func() (err error) {
		if err := ip("link set podpeer up", "addr add "+addr+"/24 dev podpeer", "route add default via "+gateway); err != nil {
			return err
		}
		at := fmt.Sprintf(":%d", PodPort)
		if p.tcp, err = net.Listen("tcp4", at); err != nil {
			return err
		}
		p.udp, err = net.ListenPacket("udp4", at)
		return err
	})
	if err != nil {
		return nil, err
	}
	go p.serve()
	go p.serveUDP()
	return p, nil
}

func within(s *netns.Space, f func() error) error {
	if s == nil {
		return f()
	}
	return s.Do(f)
}

// ip runs the tool in the namespace of the calling thread.
func ip(commands ...string) error {
	for _, c := range commands {
		if out, err := exec.Command("ip", strings.Fields(c)...).CombinedOutput(); err != nil {
			return fmt.Errorf("ip %s: %w: %s", c, err, out)
		}
	}
	return nil
}

func (p *Pod) serve() {
	for {
		c, err := p.tcp.Accept()
		if err != nil {
			return
		}
		_, _ = io.WriteString(c, Says)
		_ = c.Close()
	}
}

func (p *Pod) serveUDP() {
	b := make([]byte, 1500)
	for {
		_, from, err := p.udp.ReadFrom(b)
		if err != nil {
			return
		}
		_, _ = p.udp.WriteTo([]byte(Says), from)
	}
}

// Close ends the servers and removes the pod.
func (p *Pod) Close() {
	if p.tcp != nil {
		_ = p.tcp.Close()
	}
	if p.udp != nil {
		_ = p.udp.Close()
	}
	_ = within(p.node, func() error { return ip("link del pod0") })
	_ = p.space.Close()
}
