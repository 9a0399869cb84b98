// SPDX-License-Identifier: Apache-2.0

package host

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/link/wire"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/testkit/ports"
)

// echo serves a UDP key of the guest: what comes goes back after the name and
// the address it came from.
func (a *agent) echo(k port.Key, name string) {
	a.t.Helper()
	pc, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		a.t.Fatal(err)
	}
	a.serve(k, pc.LocalAddr().(*net.UDPAddr).AddrPort())
	a.wg.Go(func() {
		b := make([]byte, 65535)
		for {
			n, from, err := pc.ReadFromUDPAddrPort(b)
			if err != nil {
				return
			}
			_, _ = pc.WriteToUDPAddrPort(append([]byte(name), b[:n]...), from)
		}
	})
	a.t.Cleanup(func() { _ = pc.Close() })
}

func dialUDP(t *testing.T, to netip.AddrPort) *net.UDPConn {
	t.Helper()
	c, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(to))
	if err != nil {
		t.Fatal(err)
	}
	_ = c.SetDeadline(time.Now().Add(patience))
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// question sends a datagram, again if need be, and returns the answer to it. What
// it sent twice may be answered twice: an answer to an earlier question is none.
func question(t *testing.T, c *net.UDPConn, s string) string {
	t.Helper()
	b := make([]byte, 65535)
	end := time.Now().Add(patience)
	for time.Now().Before(end) {
		if _, err := c.Write([]byte(s)); err != nil && !errors.Is(err, net.ErrClosed) {
			time.Sleep(time.Millisecond) // an ICMP error of the last one
			continue
		}
		_ = c.SetReadDeadline(time.Now().Add(time.Second))
		n, err := c.Read(b)
		for ; err == nil; n, err = c.Read(b) {
			if got := string(b[:n]); strings.HasSuffix(got, s) {
				return got
			}
		}
	}
	t.Fatalf("no answer to %d bytes", len(s))
	return ""
}

func TestUDPEachClientItsOwnAnswers(t *testing.T) { eachWay(t, testUDPEachClientItsOwnAnswers) }

func testUDPEachClientItsOwnAnswers(t *testing.T) {
	a := newAgent(t, "vm")
	k := key(port.UDP, any4, ports.Free(t))
	a.echo(k, "")
	a.begins(snapshot(1, pub(k)))
	h, _ := start(t, Options{}, a)
	a.wants(k, port.Active)
	var clients []*net.UDPConn
	for range 100 {
		clients = append(clients, dialUDP(t, at(lo4, k.Port)))
	}
	for round := range 3 {
		for i, c := range clients {
			if _, err := fmt.Fprintf(c, "client %d round %d", i, round); err != nil {
				t.Fatal(err)
			}
		}
		for i, c := range clients {
			b := make([]byte, 64)
			n, err := c.Read(b)
			if want := fmt.Sprintf("client %d round %d", i, round); err != nil || string(b[:n]) != want {
				t.Fatalf("client %d read %q, %v; want %q", i, b[:n], err, want)
			}
		}
	}
	if s := h.Stats(); s.OpenUDP != 100 || s.OK != 100 {
		t.Errorf("stats = %+v, want 100 flows", s)
	}
}

func TestUDPLargeDatagram(t *testing.T) { eachWay(t, testUDPLargeDatagram) }

func testUDPLargeDatagram(t *testing.T) {
	a := newAgent(t, "vm")
	k := key(port.UDP, any4, ports.Free(t))
	a.echo(k, "")
	a.begins(snapshot(1, pub(k)))
	start(t, Options{}, a)
	a.wants(k, port.Active)
	c := dialUDP(t, at(lo4, k.Port))
	for _, n := range []int{1, 65507} { // the most that IPv4 carries
		want := strings.Repeat("d", n)
		if got := question(t, c, want); got != want {
			t.Errorf("%d bytes went, %d came back", n, len(got))
		}
	}
}

func TestUDPIdleFlowEnds(t *testing.T) { eachWay(t, testUDPIdleFlowEnds) }

func testUDPIdleFlowEnds(t *testing.T) {
	a := newAgent(t, "vm")
	k := key(port.UDP, any4, ports.Free(t))
	a.echo(k, "")
	a.begins(snapshot(1, pub(k)))
	h, _ := start(t, Options{UDPIdle: 50 * time.Millisecond}, a)
	a.wants(k, port.Active)
	c := dialUDP(t, at(lo4, k.Port))
	question(t, c, "x")
	eventually(t, "the flow ends", func() bool { return h.Stats().OpenUDP == 0 && a.server.Stats().OpenUDP == 0 })
	if got := question(t, c, "y"); got != "y" {
		t.Errorf("answer = %q", got)
	}
}

func TestUDPClientLimit(t *testing.T) { eachWay(t, testUDPClientLimit) }

func testUDPClientLimit(t *testing.T) {
	a := newAgent(t, "vm")
	k := key(port.UDP, any4, ports.Free(t))
	a.echo(k, "")
	a.begins(snapshot(1, pub(k)))
	h, _ := start(t, Options{MaxUDPClients: 2}, a)
	a.wants(k, port.Active)
	first, second, third := dialUDP(t, at(lo4, k.Port)), dialUDP(t, at(lo4, k.Port)), dialUDP(t, at(lo4, k.Port))
	for _, c := range []*net.UDPConn{first, second, first, third} {
		if got := question(t, c, "x"); got != "x" {
			t.Errorf("answer = %q", got)
		}
	}
	eventually(t, "one makes room", func() bool { return h.Stats().OpenUDP == 2 })
	if n := h.Stats().UDPEvicted; n != 1 {
		t.Errorf("UDPEvicted = %d, want 1", n)
	}
}

func TestUDPNewWinnerGetsTheClients(t *testing.T) { eachWay(t, testUDPNewHolderGetsTheClients) }

func testUDPNewHolderGetsTheClients(t *testing.T) {
	a := newAgent(t, "vm")
	p := ports.Free(t)
	wide, loopback := key(port.UDP, any4, p), key(port.UDP, lo4, p)
	a.echo(wide, "wide ")
	a.echo(loopback, "loopback ")
	a.begins(snapshot(1, pub(wide)))
	start(t, Options{}, a)
	a.wants(wide, port.Active)
	c := dialUDP(t, at(lo4, p))
	if got := question(t, c, "x"); got != "wide x" {
		t.Errorf("answer = %q", got)
	}
	a.say(put(1, pub(loopback)))
	a.wants(loopback, port.Active)
	if got := question(t, c, "y"); got != "loopback y" {
		t.Errorf("answer = %q", got)
	}
}

func TestUDPSurvivesReconnect(t *testing.T) { eachWay(t, testUDPSurvivesReconnect) }

func testUDPSurvivesReconnect(t *testing.T) {
	a := newAgent(t, "vm")
	k := key(port.UDP, any4, ports.Free(t))
	a.echo(k, "")
	a.begins(snapshot(1, pub(k)))
	h, _ := start(t, Options{Grace: time.Hour}, a)
	a.wants(k, port.Active)
	c := dialUDP(t, at(lo4, k.Port))
	question(t, c, "x")
	a.drop(errors.New("restarting"))
	eventually(t, "the flow ends with its session", func() bool { return h.Stats().OpenUDP == 0 })
	a.up()
	if got := question(t, c, "y"); got != "y" {
		t.Errorf("answer = %q", got)
	}
}

func TestUDPSlowFlowDelaysNoOther(t *testing.T) {
	eachWay(t, udpClientWhoseGuestDoesNotReadHoldsUpNobody)
}

func udpClientWhoseGuestDoesNotReadHoldsUpNobody(t *testing.T) {
	a := newAgent(t, "vm")
	k := key(port.UDP, any4, ports.Free(t))
	a.echo(k, "")
	a.begins(snapshot(1, pub(k)))
	stuck, quick := dialUDP(t, at(lo4, k.Port)), dialUDP(t, at(lo4, k.Port))
	proceed, whole := make(chan struct{}), make(chan error, 1)
	a.onFlow = func(s link.Stream, req wire.FlowRequest) bool {
		if req.Peer != stuck.LocalAddr().(*net.UDPAddr).AddrPort() {
			return false
		}
		whole <- func() error {
			if err := wire.WriteReply(s, wire.FlowReply{Status: wire.FlowOK}); err != nil {
				return err
			}
			<-proceed
			return inOrder(s)
		}()
		_ = s.Reset()
		return true
	}
	h, _ := start(t, Options{}, a)
	a.wants(k, port.Active)
	// More than any buffer on the way holds.
	for i := 0; h.Stats().DatagramsDropped < 10; i++ {
		if _, err := stuck.Write(numbered(i)); err != nil {
			t.Fatal(err)
		}
		if i%10 == 0 {
			if got := question(t, quick, "x"); got != "x" {
				t.Errorf("answer = %q", got)
			}
		}
	}
	close(proceed)
	// This answer shows that everything before it was read.
	go func() {
		for len(whole) == 0 {
			_, _ = stuck.Write([]byte("last"))
			time.Sleep(10 * time.Millisecond)
		}
	}()
	err := <-whole
	whole <- nil
	if err != nil {
		t.Error(err)
	}
}

// numbered returns a datagram whose content shows whether it is complete.
func numbered(i int) []byte {
	return binary.BigEndian.AppendUint32(bytes.Repeat([]byte{byte(i)}, 20_000+i%1000), uint32(i))
}

// inOrder reads what numbered made up to a datagram that it did not.
func inOrder(s link.Stream) error {
	r := bufio.NewReader(s)
	b := make([]byte, wire.MaxDatagram)
	for before := -1; ; {
		n, err := wire.ReadDatagram(r, b)
		if err != nil {
			return err
		}
		if string(b[:n]) == "last" {
			return nil
		}
		i := int(binary.BigEndian.Uint32(b[n-4 : n]))
		if i <= before || !bytes.Equal(b[:n], numbered(i)) {
			return fmt.Errorf("datagram %d after %d, or not as it was sent", i, before)
		}
		before = i
	}
}

func TestUDPClientsBeyondTheConnectionLimit(t *testing.T) {
	eachWay(t, func(t *testing.T) {
		a := newAgent(t, "vm")
		k := key(port.UDP, any4, ports.Free(t))
		a.echo(k, "")
		a.begins(snapshot(1, pub(k)))
		h, _ := start(t, Options{MaxUDPClients: 2 * udpConnections}, a)
		a.wants(k, port.Active)
		for range udpConnections - 1 { // as if so many were there
			_, f := h.guests[0].flows.Begin(t.Context(), k)
			t.Cleanup(f.End)
		}
		for range 3 {
			if got := question(t, dialUDP(t, at(lo4, k.Port)), "x"); got != "x" {
				t.Errorf("answer = %q", got)
			}
		}
	})
}
