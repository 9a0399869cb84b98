// SPDX-License-Identifier: Apache-2.0

package forward

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"testing"

	"github.com/fairlead/fairlead/internal/port"
)

// A connection that came in within the guest is carried to the first target that
// is not ours, with half-close.
func TestCarrySkipsOwnListener(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		b, _ := io.ReadAll(c)
		_, _ = c.Write(append([]byte("got "), b...))
	}()
	self := netip.MustParseAddrPort("127.0.0.1:9")
	s, err := NewServer(ServerOptions{Own: func(_ port.Protocol, a netip.AddrPort) bool { return a == self }})
	if err != nil {
		t.Fatal(err)
	}
	pub := port.Publication{
		Fact: port.Fact{Key: port.Key{Protocol: port.TCP, Address: self.Addr(), Port: self.Port()}},
		Dial: []netip.AddrPort{self, l.Addr().(*net.TCPAddr).AddrPort()},
	}
	client, server := pair(t, "tcp")
	done := make(chan error, 1)
	go func() { done <- s.Carry(t.Context(), server, pub) }()
	if _, err := io.WriteString(client, "hello"); err != nil {
		t.Fatal(err)
	}
	if err := client.(*net.TCPConn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(client); err != nil || string(b) != "got hello" {
		t.Errorf("answer %q, %v", b, err)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
	if st := s.Stats(); st.OK != 1 || st.OpenTCP != 0 {
		t.Errorf("stats %+v", st)
	}
}

func TestCarryResetsWithoutTarget(t *testing.T) {
	self := netip.MustParseAddrPort("127.0.0.1:9")
	s, err := NewServer(ServerOptions{Own: func(port.Protocol, netip.AddrPort) bool { return true }})
	if err != nil {
		t.Fatal(err)
	}
	client, server := pair(t, "tcp")
	err = s.Carry(context.Background(), server, port.Publication{Fact: port.Fact{Key: port.Key{Protocol: port.TCP}}, Dial: []netip.AddrPort{self}})
	if !errors.Is(err, errOwn) {
		t.Errorf("Carry = %v, want errOwn", err)
	}
	if _, err := client.Read(make([]byte, 1)); err == nil || errors.Is(err, io.EOF) {
		t.Errorf("the client read %v, want a reset", err)
	}
	if st := s.Stats(); st.Refused != 1 {
		t.Errorf("stats %+v", st)
	}
}
