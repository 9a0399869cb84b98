// SPDX-License-Identifier: Apache-2.0

package peer

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/link/forward"
	"github.com/fairlead/fairlead/internal/link/own"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/testkit/probe"
)

// newBridges echoes on each connection until its context ends.
func newBridges(t *testing.T) *Bridges {
	t.Helper()
	b := NewBridges(BridgeOptions{
		Loopback: true,
		Listen:   new(net.ListenConfig).Listen,
		Serve: func(ctx context.Context, conn net.Conn, _ port.Publication) error {
			defer conn.Close()
			stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
			defer stop()
			_, err := io.Copy(conn, conn)
			return err
		},
		ListenPacket: new(own.Sockets).ListenPacket,
		ServeUDP: func(ctx context.Context, client forward.Datagrams, _ forward.Request) error {
			defer client.Close()
			stop := context.AfterFunc(ctx, client.Stop)
			defer stop()
			var frame forward.Frame
			for {
				n, err := client.Receive(frame[forward.FrameHead:])
				if err == nil {
					err = client.Send(frame[:forward.FrameHead+n])
				}
				if err != nil {
					return err
				}
			}
		},
		Logger: slog.New(slog.DiscardHandler),
	})
	t.Cleanup(b.Close)
	return b
}

func dialFrom(t *testing.T, from string, to netip.AddrPort) net.Conn {
	t.Helper()
	d := net.Dialer{Timeout: 10 * time.Second, LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
	c, err := d.Dial("tcp", to.String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	return c
}

func echoes(c net.Conn) error {
	if _, err := io.WriteString(c, "x"); err != nil {
		return err
	}
	_, err := io.ReadFull(c, make([]byte, 1))
	return err
}

// side takes connections from the network of an address.
func side(at string) Side {
	p := netip.MustParsePrefix(at)
	return Side{p.Addr(), p}
}

func open(t *testing.T, b *Bridges, guest string, at string, n uint16) netip.AddrPort {
	t.Helper()
	where, err := b.Open(t.Context(), key(guest).Slot(), port.Publication{Fact: port.Fact{Key: key(guest)}}, side(at), n)
	if err != nil {
		t.Fatal(err)
	}
	return where
}

func TestBridgeServesOnlyItsNetwork(t *testing.T) {
	b := newBridges(t)
	where := open(t, b, "127.0.0.1:80", "127.0.1.2/24", 0)
	if err := echoes(dialFrom(t, "127.0.1.1", where)); err != nil {
		t.Errorf("from the peer's network: %v", err)
	}
	for _, from := range []string{"127.0.0.1", "127.0.1.2"} { // a container, the guest itself
		if err := probe.Want(probe.Reset, probe.From(from, where.String()), ""); err != nil {
			t.Errorf("from %s: %v", from, err)
		}
	}
}

// Another machine of the peer's network is not the peer.
func TestBridgeServesThePeerAlone(t *testing.T) {
	b := newBridges(t)
	k := key("127.0.0.1:80")
	where, err := b.Open(t.Context(), k.Slot(), port.Publication{Fact: port.Fact{Key: k}}, Side{netip.MustParseAddr("127.0.1.2"), From(netip.MustParseAddr("127.0.1.1"))}, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := echoes(dialFrom(t, "127.0.1.1", where)); err != nil {
		t.Errorf("from the peer: %v", err)
	}
	for _, from := range []string{"127.0.1.3", "127.0.1.2", "127.0.0.1"} { // a third machine, the guest, a container
		if err := probe.Want(probe.Reset, probe.From(from, where.String()), ""); err != nil {
			t.Errorf("from %s: %v", from, err)
		}
	}
}

func TestBridgeIsKeptWhileItsAddressIs(t *testing.T) {
	b := newBridges(t)
	where := open(t, b, "127.0.0.1:80", "127.0.1.2/24", 0)
	if again := open(t, b, "127.0.0.1:80", "127.0.1.2/24", 0); again != where {
		t.Errorf("%s became %s", where, again)
	}
	if moved := open(t, b, "127.0.0.1:80", "127.0.1.3/24", 0); moved.Addr() != netip.MustParseAddr("127.0.1.3") {
		t.Errorf("moved to %s", moved)
	}
	if err := probe.WantClosed(probe.At(where.String())); err != nil {
		t.Error("the old one:", err)
	}
}

func TestUDPBridgeServesOnlyItsNetwork(t *testing.T) {
	b := newBridges(t)
	k := key("127.0.0.1:80")
	k.Protocol = port.UDP
	where, err := b.Open(t.Context(), k.Slot(), port.Publication{Fact: port.Fact{Key: k}}, side("127.0.1.2/24"), 0)
	if err != nil {
		t.Fatal(err)
	}
	dial := func(from string) net.Conn {
		c, err := net.DialUDP("udp", &net.UDPAddr{IP: net.ParseIP(from)}, net.UDPAddrFromAddrPort(where))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		return c
	}
	near, far := dial("127.0.1.1"), dial("127.0.0.1")
	_ = far.SetDeadline(time.Now().Add(time.Minute))
	_ = near.SetDeadline(time.Now().Add(time.Minute))
	if _, err := io.WriteString(far, "container"); err != nil {
		t.Fatal(err)
	}
	for range 3 { // behind the other's datagram, which must have been dropped by then
		if err := echoes(near); err != nil {
			t.Fatal(err)
		}
	}
	_ = far.SetDeadline(time.Unix(1, 0))
	if n, err := far.Read(make([]byte, 16)); err == nil {
		t.Errorf("a container got %d bytes", n)
	}
	b.Keep(func(port.Slot, port.Key, bool) bool { return false })
	if l, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(where)); err != nil {
		t.Errorf("the port is not free: %v", err)
	} else {
		_ = l.Close()
	}
}

func TestConnectionsOutliveTheirBridgeUnlessForbidden(t *testing.T) {
	b := newBridges(t)
	where := open(t, b, "127.0.0.1:80", "127.0.1.2/24", 0)
	c := dialFrom(t, "127.0.1.1", where)
	if err := echoes(c); err != nil {
		t.Fatal(err)
	}
	b.Keep(func(port.Slot, port.Key, bool) bool { return false })
	if err := probe.WantClosed(probe.At(where.String())); err != nil {
		t.Error("the bridge that is not needed:", err)
	}
	if err := echoes(c); err != nil {
		t.Errorf("the connection ended with its bridge: %v", err)
	}
	where = open(t, b, "127.0.0.1:80", "127.0.1.2/24", 0)
	forbidden := dialFrom(t, "127.0.1.1", where)
	if err := echoes(forbidden); err != nil {
		t.Fatal(err)
	}
	b.Reset([]port.Key{key("127.0.0.1:80")})
	_ = forbidden.SetReadDeadline(time.Now().Add(time.Minute))
	if _, err := io.Copy(io.Discard, forbidden); errors.Is(err, os.ErrDeadlineExceeded) {
		t.Error("a forbidden connection lives")
	}
	b.Close() // ends what is left
	if err := echoes(c); err == nil {
		t.Error("a connection outlives everything")
	}
	if _, err := b.Open(t.Context(), port.Slot{}, port.Publication{Fact: port.Fact{Key: key("127.0.0.1:80")}}, side("127.0.1.2/24"), 0); !errors.Is(err, net.ErrClosed) {
		t.Errorf("open after close: %v", err)
	}
}

func TestBridgeWithTakenPort(t *testing.T) {
	b := newBridges(t)
	l, err := net.Listen("tcp", "127.0.1.2:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if _, err := b.Open(t.Context(), port.Slot{}, port.Publication{Fact: port.Fact{Key: key("127.0.0.1:80")}}, side("127.0.1.2/24"), boundTo(l.Addr()).Port()); err == nil {
		t.Error("it opened")
	}
}
