// SPDX-License-Identifier: Apache-2.0

package forward

import (
	"context"
	"io"
	"net"
	"net/netip"
	"sync"
	"testing"

	"github.com/fairlead/fairlead/internal/link"
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
	host, agent := dialled(b, b.TempDir())
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
			_ = serveStream(context.Background(), srv, stream, []netip.AddrPort{at}, req)
		}
	}()
	stream, err := host.Connect(b.Context())
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

// BenchmarkSixtyFourFlows moves 64 KiB per operation from clients to servers, on
// 64 flows beside one that nobody reads: on one link, on four, and with a
// connection for each flow. It is what decided for the latter.
func BenchmarkSixtyFourFlows(b *testing.B) {
	const flows = 64
	for name, links := range map[string]int{"1 link": 1, "4 links": 4, "connection each": 0} {
		b.Run(name, func(b *testing.B) {
			lanes := newLanes(b, links)
			type pair struct{ client, server net.Conn }
			pairs := make([]pair, flows+1)
			for i := range pairs {
				pairs[i].client, pairs[i].server = lanes.open(b, i)
			}
			go func() { _, _ = io.Copy(pairs[flows].client, endless{}) }() // nobody reads it
			buf := make([]byte, 64<<10)
			b.SetBytes(int64(len(buf)))
			each := b.N/flows + 1
			var wg sync.WaitGroup
			b.ResetTimer()
			for _, p := range pairs[:flows] {
				wg.Go(func() {
					if _, err := io.CopyN(io.Discard, struct{ io.Reader }{p.server}, int64(each)*int64(len(buf))); err != nil {
						b.Error(err)
					}
				})
				wg.Go(func() {
					for range each {
						if _, err := p.client.Write(buf); err != nil {
							b.Error(err)
							return
						}
					}
				})
			}
			wg.Wait()
			b.StopTimer()
		})
	}
}

type endless struct{}

func (endless) Read(b []byte) (int, error) { return len(b), nil }

// lanes opens flows over some links, or each over a connection of its own.
type lanes struct {
	ln    net.Listener // the servers'
	hosts []link.Session
	unix  net.Listener
}

func newLanes(b *testing.B, links int) *lanes {
	b.Helper()
	listen := func(network, addr string) net.Listener {
		l, err := net.Listen(network, addr)
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { _ = l.Close() })
		return l
	}
	l := &lanes{ln: listen("tcp", "127.0.0.1:0"), unix: listen("unix", b.TempDir()+"/s")}
	at := l.ln.Addr().(*net.TCPAddr).AddrPort()
	for range links {
		near, far := l.connect(b)
		host, agent := linked(b, near, far)
		srv, err := NewServer(ServerOptions{})
		if err != nil {
			b.Fatal(err)
		}
		var wg sync.WaitGroup
		wg.Go(func() {
			for {
				stream, err := agent.Accept(context.Background())
				if err != nil {
					return
				}
				wg.Go(func() {
					if req, err := wire.ReadRequest(stream); err == nil {
						_ = serveStream(context.Background(), srv, stream, []netip.AddrPort{at}, req)
					}
				})
			}
		})
		b.Cleanup(func() {
			_, _ = host.Close(), agent.Close()
			wg.Wait()
		})
		l.hosts = append(l.hosts, host)
	}
	return l
}

func (l *lanes) connect(b *testing.B) (near, far net.Conn) {
	b.Helper()
	near, err := net.Dial("unix", l.unix.Addr().String())
	if err != nil {
		b.Fatal(err)
	}
	if far, err = l.unix.Accept(); err != nil {
		b.Fatal(err)
	}
	return near, far
}

// open returns the two ends of the i-th flow.
func (l *lanes) open(b *testing.B, i int) (client, server net.Conn) {
	b.Helper()
	front, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	defer front.Close()
	tcp := func(at net.Listener) net.Conn {
		c, err := net.Dial("tcp", at.Addr().String())
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { _ = c.Close() })
		return c
	}
	accept := func(at net.Listener) net.Conn {
		c, err := at.Accept()
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { _ = c.Close() })
		return c
	}
	client = tcp(front)
	hostSide := accept(front)
	if len(l.hosts) == 0 {
		x, y := l.connect(b)
		guestSide := tcp(l.ln)
		spliceInBackground(b, hostSide, x)
		spliceInBackground(b, y, guestSide)
		return client, accept(l.ln)
	}
	stream, err := l.hosts[i%len(l.hosts)].Open(b.Context())
	if err != nil {
		b.Fatal(err)
	}
	if err := wire.WriteRequest(stream, wire.FlowRequest{Key: tcpKey(l.ln.Addr().(*net.TCPAddr).AddrPort().Port())}); err != nil {
		b.Fatal(err)
	}
	if _, err := wire.ReadReply(stream); err != nil {
		b.Fatal(err)
	}
	spliceInBackground(b, hostSide, stream)
	return client, accept(l.ln)
}
