// SPDX-License-Identifier: Apache-2.0

package forward

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"testing"

	"github.com/fairlead/fairlead/internal/port"
)

// readProxyHeader reads a header of the PROXY protocol as section 2.2 of its specification has
// it, and returns "UNSPEC" or the family, the client and its destination.
func readProxyHeader(r io.Reader) (string, error) {
	head := make([]byte, 16)
	if _, err := io.ReadFull(r, head); err != nil {
		return "", err
	}
	if !bytes.Equal(head[:12], []byte{0x0d, 0x0a, 0x0d, 0x0a, 0x00, 0x0d, 0x0a, 0x51, 0x55, 0x49, 0x54, 0x0a}) {
		return "", fmt.Errorf("signature %x", head[:12])
	}
	if head[12] != 0x21 {
		return "", fmt.Errorf("version and command %x", head[12])
	}
	body := make([]byte, binary.BigEndian.Uint16(head[14:]))
	if _, err := io.ReadFull(r, body); err != nil {
		return "", err
	}
	var size int
	var family string
	switch head[13] {
	case 0x00:
		if len(body) != 0 {
			return "", fmt.Errorf("%d bytes of no address", len(body))
		}
		return "UNSPEC", nil
	case 0x11:
		size, family = 4, "TCP4"
	case 0x21:
		size, family = 16, "TCP6"
	default:
		return "", fmt.Errorf("family and protocol %x", head[13])
	}
	if len(body) != 2*size+4 {
		return "", fmt.Errorf("%d bytes of addresses", len(body))
	}
	from, _ := netip.AddrFromSlice(body[:size])
	to, _ := netip.AddrFromSlice(body[size : 2*size])
	ports := body[2*size:]
	return fmt.Sprintf("%s %s %s", family, netip.AddrPortFrom(from, binary.BigEndian.Uint16(ports)), netip.AddrPortFrom(to, binary.BigEndian.Uint16(ports[2:]))), nil
}

func addrOf(s string) (a netip.AddrPort) {
	if s != "" {
		a = netip.MustParseAddrPort(s)
	}
	return a
}

func TestProxyHeader(t *testing.T) {
	for _, c := range []struct{ client, at, want string }{
		{"192.0.2.1:50000", "198.51.100.1:80", "TCP4 192.0.2.1:50000 198.51.100.1:80"},
		{"[2001:db8::1]:50000", "[2001:db8::2]:443", "TCP6 [2001:db8::1]:50000 [2001:db8::2]:443"},
		{"192.0.2.1:50000", "[2001:db8::2]:443", "TCP6 [::ffff:192.0.2.1]:50000 [2001:db8::2]:443"},
		{"[2001:db8::1]:50000", "198.51.100.1:80", "TCP6 [2001:db8::1]:50000 [::ffff:198.51.100.1]:80"},
		{"[::ffff:192.0.2.1]:50000", "[::ffff:198.51.100.1]:80", "TCP4 192.0.2.1:50000 198.51.100.1:80"},
		{"[fe80::1%eth0]:50000", "[fe80::2%eth0]:80", "TCP6 [fe80::1]:50000 [fe80::2]:80"},
		{"", "198.51.100.1:80", "UNSPEC"},
		{"", "", "UNSPEC"},
	} {
		b := bytes.NewBuffer(appendProxyHeader(nil, addrOf(c.client), addrOf(c.at)))
		if n := b.Len(); n > proxyMax {
			t.Errorf("%s to %s: %d bytes", c.client, c.at, n)
		}
		if got, err := readProxyHeader(b); err != nil || got != c.want || b.Len() > 0 {
			t.Errorf("%s to %s: %q, %v, %d bytes more; want %q", c.client, c.at, got, err, b.Len(), c.want)
		}
	}
	const golden = "0d0a0d0a000d0a515549540a2111000cc0000201c6336401c3500050"
	if got := hex.EncodeToString(appendProxyHeader(nil, addrOf("192.0.2.1:50000"), addrOf("198.51.100.1:80"))); got != golden {
		t.Errorf("%s, want %s", got, golden)
	}
}

// What is written of any addresses is read as these, in one family.
func FuzzProxyHeader(f *testing.F) {
	f.Add([]byte{192, 0, 2, 1}, uint16(50000), []byte{198, 51, 100, 1}, uint16(80))
	f.Add(bytes.Repeat([]byte{1}, 16), uint16(0), []byte{198, 51, 100, 1}, uint16(65535))
	f.Add([]byte{}, uint16(1), []byte{}, uint16(2))
	f.Fuzz(func(t *testing.T, client []byte, clientPort uint16, at []byte, atPort uint16) {
		from, known := netip.AddrFromSlice(client)
		to, _ := netip.AddrFromSlice(at)
		b := bytes.NewBuffer(appendProxyHeader(nil, netip.AddrPortFrom(from, clientPort), netip.AddrPortFrom(to, atPort)))
		got, err := readProxyHeader(b)
		if err != nil || b.Len() > 0 {
			t.Fatalf("%q, %v, %d bytes more", got, err, b.Len())
		}
		if !known {
			if got != "UNSPEC" {
				t.Fatal(got)
			}
			return
		}
		var family, readFrom, readTo string
		if _, err := fmt.Sscan(got, &family, &readFrom, &readTo); err != nil {
			t.Fatal(err)
		}
		is := netip.MustParseAddrPort(readFrom)
		if is.Addr().Unmap() != from.Unmap() || is.Port() != clientPort || netip.MustParseAddrPort(readTo).Port() != atPort {
			t.Fatalf("%s of %s", got, from)
		}
	})
}

// A server that a rule has told gets the header before the first byte, also if the server
// speaks first; others get none.
func TestServerIsToldTheClient(t *testing.T) {
	at, client := addrOf("127.0.0.1:8080"), addrOf("192.0.2.1:50000")
	for name, c := range map[string]struct {
		protocol port.ProxyProtocol
		request  Request
		want     string
	}{
		"no rule": {port.ProxyProtocolNone, Request{Peer: client, At: at}, ""},
		"told":    {port.ProxyProtocolV2, Request{Peer: client, At: at}, "TCP4 192.0.2.1:50000 127.0.0.1:8080"},
		"unknown": {port.ProxyProtocolV2, Request{At: at}, "UNSPEC"},
		"hidden":  {port.ProxyProtocolV2, Request{Peer: client, At: at, Hidden: true}, "UNSPEC"},
	} {
		t.Run(name, func(t *testing.T) {
			l, pub := listen(t)
			heard, told := make(chan string, 1), c.want != ""
			go func() {
				c, err := l.Accept()
				if err != nil {
					return
				}
				defer c.Close()
				_, _ = io.WriteString(c, "hello")
				got := ""
				if told {
					if got, err = readProxyHeader(c); err != nil {
						got = err.Error()
					}
				}
				rest, _ := io.ReadAll(c)
				heard <- got + "|" + string(rest)
			}()
			s, err := NewServer(ServerOptions{})
			if err != nil {
				t.Fatal(err)
			}
			pub.ProxyProtocol = c.protocol
			c.request.Publication = pub
			near, far := pair(t, "tcp")
			done := make(chan error, 1)
			go func() { done <- s.Serve(t.Context(), far, c.request) }()
			if got := readN(t, near, 5); got != "hello" {
				t.Errorf("the server says %q", got)
			}
			write(t, near, "request")
			_ = near.(*net.TCPConn).CloseWrite()
			if got := <-heard; got != c.want+"|request" {
				t.Errorf("the server heard %q, want %q", got, c.want+"|request")
			}
			if err := <-done; err != nil {
				t.Error(err)
			}
			if st := s.Stats(); st.ToGuest != uint64(len("request")) {
				t.Errorf("%d bytes to the guest are counted", st.ToGuest)
			}
		})
	}
}

// A relay within the guest is not the client; who comes from elsewhere is.
func TestCarriedClients(t *testing.T) {
	l, pub := listen(t)
	pub.ProxyProtocol = port.ProxyProtocolV2
	s, err := NewServer(ServerOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		carry func(net.Conn) error
		from  string
		want  string
	}{
		"relay":     {func(c net.Conn) error { return s.Carry(t.Context(), c, pub) }, "127.0.0.1:50000", "UNSPEC"},
		"client":    {func(c net.Conn) error { return s.Carry(t.Context(), c, pub) }, "192.0.2.1:50000", "TCP4 192.0.2.1:50000 127.0.0.1:80"},
		"forwarder": {func(c net.Conn) error { return s.CarryHidden(t.Context(), c, pub) }, "192.0.2.1:50000", "UNSPEC"},
	} {
		near, far := pair(t, "tcp")
		done := make(chan struct{})
		go func() {
			defer close(done)
			_ = c.carry(from{far.(*net.TCPConn), net.TCPAddrFromAddrPort(addrOf(c.from)), net.TCPAddrFromAddrPort(addrOf("127.0.0.1:80"))})
		}()
		conn, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		if got, err := readProxyHeader(conn); err != nil || got != c.want {
			t.Errorf("%s: %q, %v; want %q", name, got, err, c.want)
		}
		_, _ = conn.Close(), near.Close()
		<-done
	}
}

// from is a connection with other addresses.
type from struct {
	*net.TCPConn
	remote, local *net.TCPAddr
}

func (c from) RemoteAddr() net.Addr { return c.remote }
func (c from) LocalAddr() net.Addr  { return c.local }

// Without the header nothing of the client reaches the server.
func TestHeaderThatCannotBeSent(t *testing.T) {
	_, pub := listen(t)
	pub.ProxyProtocol = port.ProxyProtocolV2
	broken := errors.New("broken")
	s, err := NewServer(ServerOptions{Dial: func(ctx context.Context, network string, target netip.AddrPort) (net.Conn, error) {
		c, err := DialGuest(ctx, network, target)
		return unwritable{c, broken}, err
	}})
	if err != nil {
		t.Fatal(err)
	}
	near, far := pair(t, "tcp")
	write(t, near, "request")
	if err := s.Serve(t.Context(), far, Request{Publication: pub}); !errors.Is(err, broken) {
		t.Errorf("%v", err)
	}
	if _, err := near.Read(make([]byte, 1)); !isReset(err) {
		t.Errorf("the client reads %v, want a reset", err)
	}
}

type unwritable struct {
	net.Conn
	err error
}

func (c unwritable) Write([]byte) (int, error) { return 0, c.err }
