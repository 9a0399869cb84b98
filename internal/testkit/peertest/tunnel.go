// SPDX-License-Identifier: Apache-2.0

package peertest

import (
	"io"
	"net"
	"sync"
	"testing"
	"time"
)

// Tunnel imitates vtunnel's end in the guest, which carries connections to a Receiver.
// It closes both connections as soon as either ends. It dies when it cannot reach the
// receiver, and its supervisor starts it again after a moment.
type Tunnel struct {
	t           testing.TB
	address, to string

	mu     sync.Mutex
	l      net.Listener
	conns  map[net.Conn]struct{}
	deaths int
	ended  bool
	wg     sync.WaitGroup
}

// respawn is the pause before the supervisor starts it again.
const respawn = 20 * time.Millisecond

// NewTunnel starts a tunnel at an address to a receiver at TCP. It ends with the test.
func NewTunnel(t testing.TB, address string, to *Receiver) *Tunnel {
	t.Helper()
	n := &Tunnel{t: t, address: address, to: to.address}
	n.start()
	t.Cleanup(func() {
		n.mu.Lock()
		n.ended = true
		n.stop()
		n.mu.Unlock()
		n.wg.Wait()
	})
	return n
}

// URL is the sink's URL of the tunnel.
func (n *Tunnel) URL() string { return "tcp://" + n.address }

// Deaths returns how often it died.
func (n *Tunnel) Deaths() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.deaths
}

func (n *Tunnel) start() {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.ended {
		return
	}
	l, err := net.Listen("tcp", n.address)
	if err != nil {
		n.t.Error(err)
		return
	}
	n.l, n.conns = l, make(map[net.Conn]struct{})
	n.wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			n.wg.Go(func() { n.carry(l, c) })
		}
	})
}

// stop ends it as the end of its process does. The caller holds mu.
func (n *Tunnel) stop() {
	_ = n.l.Close()
	for c := range n.conns {
		_ = c.Close()
	}
}

func (n *Tunnel) carry(l net.Listener, c net.Conn) {
	host, err := net.Dial("tcp", n.to)
	n.mu.Lock()
	if n.ended || n.l != l {
		err = net.ErrClosed
	} else if err != nil {
		n.die()
	}
	if err != nil {
		n.mu.Unlock()
		_ = c.Close()
		if host != nil {
			_ = host.Close()
		}
		return
	}
	n.conns[c], n.conns[host] = struct{}{}, struct{}{}
	n.mu.Unlock()
	one := make(chan struct{}, 2)
	for _, p := range [][2]net.Conn{{c, host}, {host, c}} {
		n.wg.Go(func() { _, _ = io.Copy(p[0], p[1]); one <- struct{}{} })
	}
	<-one
	_, _ = c.Close(), host.Close()
}

// die ends it, and has it started again. The caller holds mu.
func (n *Tunnel) die() {
	n.deaths++
	n.stop()
	n.l = nil
	n.wg.Go(func() { time.Sleep(respawn); n.start() })
}
