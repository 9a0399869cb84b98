// SPDX-License-Identifier: Apache-2.0

package forward

import (
	"context"
	"io"
	"net"
	"net/netip"
	"testing"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/wire"
)

// carried returns a client and the server's end of a flow: through a link, or
// through two splices with a unix connection of its own between them.
func carried(b *testing.B, throughLink bool) (client, server net.Conn) {
	b.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	defer ln.Close()
	tcp := func() (near, far net.Conn) {
		near, err := net.Dial("tcp", ln.Addr().String())
		if err != nil {
			b.Fatal(err)
		}
		far, err = ln.Accept()
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { _, _ = near.Close(), far.Close() })
		return near, far
	}
	unix := func() (near, far net.Conn) {
		u, err := net.Listen("unix", b.TempDir()+"/s")
		if err != nil {
			b.Fatal(err)
		}
		defer u.Close()
		if near, err = net.Dial("unix", u.Addr().String()); err != nil {
			b.Fatal(err)
		}
		if far, err = u.Accept(); err != nil {
			b.Fatal(err)
		}
		return near, far
	}
	client, hostSide := tcp()
	if !throughLink {
		guestSide, server := tcp()
		x, y := unix()
		spliceInBackground(b, hostSide, x)
		spliceInBackground(b, y, guestSide)
		return client, server
	}
	near, far := unix()
	host, agent := linked(b, near, far)
	srv, err := NewServer(ServerOptions{})
	if err != nil {
		b.Fatal(err)
	}
	at := ln.Addr().(*net.TCPAddr).AddrPort()
	done := make(chan struct{})
	go func() {
		defer close(done)
		stream, err := agent.Accept(context.Background())
		if err != nil {
			return
		}
		if req, err := wire.ReadRequest(stream); err == nil {
			_ = srv.Serve(context.Background(), stream, port.Publication{Key: req.Key, Dial: []netip.AddrPort{at}}, req)
		}
	}()
	stream, err := host.Open(b.Context())
	if err != nil {
		b.Fatal(err)
	}
	if err := wire.WriteRequest(stream, wire.FlowRequest{Key: tcpKey(at.Port())}); err != nil {
		b.Fatal(err)
	}
	if _, err := wire.ReadReply(stream); err != nil {
		b.Fatal(err)
	}
	if server, err = ln.Accept(); err != nil {
		b.Fatal(err)
	}
	spliceInBackground(b, hostSide, stream)
	b.Cleanup(func() {
		_ = server.Close()
		_, _ = host.Close(), agent.Close()
		<-done
	})
	return client, server
}

func spliceInBackground(b *testing.B, x, y net.Conn) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = Splice(context.Background(), x, y, nil)
	}()
	b.Cleanup(func() {
		Reset(x)
		<-done
	})
}

func BenchmarkThroughput(b *testing.B) {
	for _, through := range []string{"splice", "link"} {
		b.Run(through, func(b *testing.B) {
			client, server := carried(b, through == "link")
			buf := make([]byte, 64<<10)
			b.SetBytes(int64(len(buf)))
			go func() { _, _ = io.Copy(io.Discard, struct{ io.Reader }{server}) }()
			b.ResetTimer()
			for range b.N {
				if _, err := client.Write(buf); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkRoundTrip(b *testing.B) {
	for _, through := range []string{"splice", "link"} {
		b.Run(through, func(b *testing.B) {
			client, server := carried(b, through == "link")
			go func() { _, _ = io.Copy(struct{ io.Writer }{server}, struct{ io.Reader }{server}) }()
			buf := make([]byte, 64)
			b.ResetTimer()
			for range b.N {
				if _, err := client.Write(buf); err != nil {
					b.Fatal(err)
				}
				if _, err := io.ReadFull(client, buf); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
