// SPDX-License-Identifier: Apache-2.0

package forward

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/link/own"
	"github.com/fairlead/fairlead/internal/port"
)

// echoClients serves each client of a socket by what it sent, and returns the port.
func echoClients(t *testing.T, network, address string) uint16 {
	t.Helper()
	pc, err := new(own.Sockets).ListenPacket(t.Context(), network, address)
	if err != nil {
		t.Fatal(err)
	}
	return echoAt(t, pc)
}

// echoAt is echoClients of a socket.
func echoAt(t *testing.T, pc *own.UDPConn) uint16 {
	t.Helper()
	book := NewBook(100)
	c := NewClients(pc, func(netip.AddrPort) (func(Datagrams), *Flow) {
		ctx, f := book.Begin(context.Background(), port.Key{Protocol: port.UDP})
		return func(d Datagrams) {
			defer f.End()
			defer context.AfterFunc(ctx, d.Stop)()
			for b := make([]byte, FrameHead+MaxDatagram); ; {
				n, err := d.Receive(b[FrameHead:])
				if err != nil || d.Send(b[:FrameHead+n]) != nil {
					return
				}
			}
		}, f
	})
	done := make(chan struct{})
	go func() { defer close(done); c.Run(context.Background()) }()
	t.Cleanup(func() { _ = c.Close(); <-done })
	return pc.LocalAddr().(*net.UDPAddr).AddrPort().Port()
}

// A client whose socket is connected takes an answer only from the address that it sent to.
func TestLocalAnswerComesFromWhereItWasSent(t *testing.T) {
	for _, c := range []struct {
		network, at string
		to          []string
	}{
		{"udp4", "0.0.0.0:0", []string{"127.0.0.1", "127.0.0.2"}},
		{"udp6", "[::]:0", []string{"::1"}},
		{"udp", "[::]:0", []string{"::1", "127.0.0.1", "127.0.0.2"}},
		{"udp", ":0", []string{"::1", "127.0.0.2"}},
		{"udp4", "127.0.0.2:0", []string{"127.0.0.2"}},
		{"udp6", "[::1]:0", []string{"::1"}},
	} {
		p := echoClients(t, c.network, c.at)
		for _, to := range c.to {
			conn, err := net.Dial("udp", netip.AddrPortFrom(netip.MustParseAddr(to), p).String())
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			_ = conn.SetDeadline(time.Now().Add(patience))
			for i := range 2 {
				if _, err := fmt.Fprintf(conn, "%s %d", to, i); err != nil {
					t.Fatal(err)
				}
				b := make([]byte, 64)
				n, err := conn.Read(b)
				if want := fmt.Sprint(to, " ", i); err != nil || string(b[:n]) != want {
					t.Errorf("%s %s: %s answers %q, %v", c.network, c.at, to, b[:n], err)
				}
			}
		}
	}
}

// Answers to what was sent to all, or to a group, leave from an address of ours.
func TestLocalAnswerToBroadcast(t *testing.T) {
	for _, c := range [][2]string{{"udp4", "0.0.0.0:0"}, {"udp", "[::]:0"}} {
		to := netip.AddrPortFrom(netip.MustParseAddr("127.255.255.255"), echoClients(t, c[0], c[1]))
		conn, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		_ = conn.SetDeadline(time.Now().Add(patience))
		if _, err := conn.WriteToUDPAddrPort([]byte("all"), to); err != nil {
			t.Fatal(err)
		}
		b := make([]byte, 64)
		n, from, err := conn.ReadFromUDPAddrPort(b)
		if err != nil || string(b[:n]) != "all" || from.Addr().Unmap() != netip.MustParseAddr("127.0.0.1") {
			t.Errorf("%s: answer %q from %s, %v", c, b[:n], from, err)
		}
	}
}

// The interface of a link-local client is looked up once, not for each answer.
func TestAnswersNameTheInterface(t *testing.T) {
	for from, want := range map[string]string{
		"[fe80::1%1]:9": "[fe80::1%lo]:9", "[fe80::1%2147483647]:9": "[fe80::1%2147483647]:9", "[fd00::1]:9": "[fd00::1]:9", "127.0.0.1:9": "127.0.0.1:9",
	} {
		a := NewAnswers(nil, Client{Addr: netip.MustParseAddrPort(from)})
		if got := a.to.String(); got != want {
			t.Errorf("to %s, want %s", got, want)
		}
	}
}

// What the kernel tells is read as it is, and nothing else is an address.
func FuzzArrivedAt(f *testing.F) {
	for _, a := range []string{"127.0.0.2", "fd00::1", "fe80::1%3"} {
		f.Add(sourceControl(netip.MustParseAddr(a)))
	}
	f.Add([]byte{})
	f.Add([]byte{1}) // less than a header
	f.Fuzz(func(t *testing.T, b []byte) {
		at := arrivedAt(b)
		if !at.IsValid() {
			return
		}
		if at.IsUnspecified() || at.IsMulticast() || at.Is4In6() {
			t.Fatalf("%s", at)
		}
		if got := arrivedAt(sourceControl(at)); got != at {
			t.Fatalf("%s became %s", at, got)
		}
	})
}
