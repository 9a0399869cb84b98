// SPDX-License-Identifier: Apache-2.0

package forward

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/link/wire"
	"github.com/fairlead/fairlead/internal/port"
)

// echo returns a UDP server that sends back what it gets after its name.
func echo(t *testing.T, name string) port.Publication {
	t.Helper()
	pc, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		b := make([]byte, wire.MaxDatagram)
		for {
			n, from, err := pc.ReadFromUDPAddrPort(b)
			if err != nil {
				return
			}
			_, _ = pc.WriteToUDPAddrPort(append([]byte(name), b[:n]...), from)
		}
	}()
	t.Cleanup(func() {
		_ = pc.Close()
		<-done
	})
	at := pc.LocalAddr().(*net.UDPAddr).AddrPort()
	return port.Publication{Fact: port.Fact{Key: udpKey(at.Port())}, Dial: []netip.AddrPort{at}}
}

func sendDatagram(t *testing.T, s link.Stream, payload string) {
	t.Helper()
	frame := append(make([]byte, wire.DatagramHeader), payload...)
	if err := wire.WriteDatagram(s, frame); err != nil {
		t.Fatal(err)
	}
}

func readDatagram(t *testing.T, s link.Stream) string {
	t.Helper()
	b := make([]byte, wire.MaxDatagram)
	n, err := wire.ReadDatagram(s, b)
	if err != nil {
		t.Fatal(err)
	}
	return string(b[:n])
}

func TestUDPSizes(t *testing.T) {
	pub := echo(t, "")
	g := newGuest(t, ServerOptions{}, pub)
	stream, reply := g.open(t, pub.Key, "127.0.0.1:1")
	if reply.Status != wire.FlowOK {
		t.Fatalf("reply = %+v", reply)
	}
	defer stream.Close()
	for _, n := range []int{0, 1, 1400, 4096, 9000, 65507} { // the most that IPv4 carries
		want := strings.Repeat("d", n)
		sendDatagram(t, stream, want)
		if got := readDatagram(t, stream); got != want {
			t.Errorf("%d bytes went, %d came back", n, len(got))
		}
	}
}

func TestUDPAfterPortUnreachable(t *testing.T) {
	at := closedPort(t)
	pub := port.Publication{Fact: port.Fact{Key: udpKey(at.Port())}, Dial: []netip.AddrPort{at}}
	g := newGuest(t, ServerOptions{}, pub)
	stream, reply := g.open(t, pub.Key, "")
	if reply.Status != wire.FlowOK {
		t.Fatalf("reply = %+v", reply)
	}
	defer stream.Close()
	for range 10 {
		sendDatagram(t, stream, "anybody there?")
	}
	eventually(t, "all was sent", func() bool { return g.Stats().ToGuest == 10*14 })

	pc, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(at))
	if err != nil {
		t.Fatal(err)
	}
	defer pc.Close()
	sendDatagram(t, stream, "now?")
	_ = pc.SetDeadline(time.Now().Add(patience))
	b := make([]byte, 64)
	n, from, err := pc.ReadFromUDPAddrPort(b)
	for err == nil && string(b[:n]) == "anybody there?" { // counted, and sent a moment later
		n, from, err = pc.ReadFromUDPAddrPort(b)
	}
	if err != nil || string(b[:n]) != "now?" {
		t.Fatalf("server read %q, %v", b[:n], err)
	}
	if _, err := pc.WriteToUDPAddrPort([]byte("yes"), from); err != nil {
		t.Fatal(err)
	}
	if got := readDatagram(t, stream); got != "yes" {
		t.Errorf("client read %q", got)
	}
}

func TestUDPTargetFallback(t *testing.T) {
	pub := echo(t, "echo ")
	good := pub.Dial[0]
	pub.Dial = []netip.AddrPort{closedPort(t), closedPort(t), good}
	g := newGuest(t, ServerOptions{}, pub)
	stream, _ := g.open(t, pub.Key, "127.0.0.1:1")
	defer stream.Close()
	sendDatagram(t, stream, "1")
	if got := readDatagram(t, stream); got != "echo 1" {
		t.Errorf("client read %q", got)
	}
	if got := g.targets(Request{Publication: pub, Peer: netip.MustParseAddrPort("127.0.0.1:2")}); got[0] != good {
		t.Errorf("targets = %v, want %v first", got, good)
	}
}

// packets is a UDP connection in memory.
type packets struct {
	net.Conn // for the methods not used
	in, out  chan string
	done     chan struct{}
}

func newPackets() *packets {
	return &packets{in: make(chan string), out: make(chan string, 16), done: make(chan struct{})}
}

func (p *packets) Read(b []byte) (int, error) {
	select {
	case s := <-p.in:
		return copy(b, s), nil
	case <-p.done:
		return 0, net.ErrClosed
	}
}

func (p *packets) Write(b []byte) (int, error) {
	p.out <- string(b)
	return len(b), nil
}

func (p *packets) Close() error {
	close(p.done)
	return nil
}

func TestUDPIdleBubble(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		conn := newPackets()
		pub := port.Publication{Fact: port.Fact{Key: udpKey(53)}, Dial: []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:53")}}
		g := newGuest(t, ServerOptions{
			UDPIdle: time.Minute,
			Dial:    func(context.Context, string, netip.AddrPort) (net.Conn, error) { return conn, nil },
		}, pub)
		stream, _ := g.open(t, pub.Key, "")
		_ = stream.SetDeadline(time.Time{})
		start := time.Now()
		time.Sleep(50 * time.Second)
		sendDatagram(t, stream, "one")
		<-conn.out
		time.Sleep(50 * time.Second)
		conn.in <- "two"
		if got := readDatagram(t, stream); got != "two" {
			t.Errorf("client read %q", got)
		}
		b := make([]byte, 8)
		if n, err := wire.ReadDatagram(stream, b); !errors.Is(err, io.EOF) {
			t.Errorf("read = %d, %v; want the end", n, err)
		}
		if got := time.Since(start); got != 160*time.Second {
			t.Errorf("the flow ended after %v, want 1 minute after the last datagram", got)
		}
		synctest.Wait()
		if got := g.Stats().OpenUDP; got != 0 {
			t.Errorf("%d flows are open", got)
		}
		select {
		case <-conn.done:
		default:
			t.Error("the socket is open")
		}
		_ = stream.Close()
	})
}

func TestIdleBubble(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var fired []time.Duration
		start := time.Now()
		i := NewIdle(time.Second, func() { fired = append(fired, time.Since(start)) })
		for range 30 {
			time.Sleep(100 * time.Millisecond)
			i.Touch()
		}
		time.Sleep(time.Hour)
		synctest.Wait()
		if want := []time.Duration{4 * time.Second}; !slices.Equal(fired, want) {
			t.Errorf("fired at %v, want %v", fired, want)
		}
		i.Stop()
		j := NewIdle(time.Second, func() { t.Error("fired after Stop") })
		j.Stop()
		time.Sleep(time.Hour)
	})
}
