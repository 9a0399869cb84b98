// SPDX-License-Identifier: Apache-2.0

package forward

import (
	"bytes"
	"crypto/sha256"
	"math/rand/v2"

	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/link/wire"
	"github.com/fairlead/fairlead/internal/port"
)

func TestServerOptions(t *testing.T) {
	for _, o := range []ServerOptions{{DialTimeout: -1}, {UDPIdle: -1}} {
		if _, err := NewServer(o); err == nil {
			t.Errorf("NewServer(%+v) gave no error", o)
		}
	}
}

func TestFlowResetOverLink(t *testing.T) {
	for _, from := range []string{"client", "server"} {
		t.Run(from, func(t *testing.T) {
			_, client, server := flow(t)
			write(t, client, "x")
			readN(t, server, 1)
			near, far := client, server
			if from == "server" {
				near, far = server, client
			}
			Reset(near)
			if _, err := far.Read(make([]byte, 1)); !isReset(err) {
				t.Errorf("read at the other end = %v, want a reset", err)
			}
		})
	}
}

// A reset is noticed at the other end of the link by a side that has read the end
// and sends nothing, whichever side ended first.
func TestFlowResetAfterHalfCloseOverLink(t *testing.T) {
	for _, resets := range []string{"client", "server"} {
		t.Run(resets, func(t *testing.T) {
			g, a, b := flow(t)
			write(t, a, "x")
			readN(t, b, 1)
			if resets == "server" {
				a, b = b, a
			}
			closeWriting(t, a)
			if got := readAll(t, b); got != "" {
				t.Errorf("read %q", got)
			}
			Reset(a)
			// A write would find it too, so look without one.
			if err := awaitReset(b); err == nil {
				t.Error("no reset")
			}
			eventually(t, "the flow is gone", func() bool { return g.Stats().OpenTCP == 0 })
		})
	}
}

// A truncated upload does not look complete, even to a server
// that has ended its own side.
func TestFlowLostAfterServerEOF(t *testing.T) {
	_, client, server := flow(t)
	write(t, client, "x")
	closeWriting(t, server)
	if got := readAll(t, client); got != "" {
		t.Errorf("read %q", got)
	}
	write(t, client, "half of it")
	readN(t, server, len("x"+"half of it"))
	Reset(client)
	if _, err := server.Read(make([]byte, 1)); !isReset(err) {
		t.Errorf("the server reads %v, want a reset", err)
	}
}

// Much goes through the kernel, both ways at once, and comes out as it went in.
func TestBulkOverLink(t *testing.T) {
	g, a, b := flow(t)
	write(t, a, "x")
	readN(t, b, 1)
	const size = 64 << 20
	var wg sync.WaitGroup
	for name, ends := range map[string][2]net.Conn{"to the guest": {a, b}, "to the host": {b, a}} {
		wg.Go(func() {
			if _, err := io.CopyN(struct{ io.Writer }{ends[0]}, newPattern(), size); err != nil {
				t.Errorf("%s: %v", name, err)
			}
			closeWriting(t, ends[0])
		})
		wg.Go(func() {
			want, got := sha256.New(), sha256.New()
			_, _ = io.CopyN(want, newPattern(), size)
			n, err := io.Copy(got, struct{ io.Reader }{ends[1]})
			if err != nil || n != size || !bytes.Equal(got.Sum(nil), want.Sum(nil)) {
				t.Errorf("%s: %d bytes of %d, %v, or others than were sent", name, n, size, err)
			}
		})
	}
	wg.Wait()
	eventually(t, "the flow is gone", func() bool { return g.Stats().OpenTCP == 0 })
	if got := g.Stats(); got.ToGuest != size+1 || got.ToHost != size {
		t.Errorf("stats = %+v", got)
	}
}

// newPattern is always the same row of bytes.
func newPattern() io.Reader { return rand.NewChaCha8([32]byte{1}) }

func TestLostLinkResetsFlows(t *testing.T) {
	g, client, server := flow(t)
	_ = g.host.Close()
	for name, c := range map[string]net.Conn{"client": client, "server": server} {
		if _, err := c.Read(make([]byte, 1)); !isReset(err) {
			t.Errorf("read at the %s = %v, want a reset", name, err)
		}
	}
}

func TestSlowReaderBlocksNoOther(t *testing.T) {
	ln, pub := listen(t)
	g := newGuest(t, ServerOptions{}, pub)
	const flows, size = 200, 64 << 10

	// Flow 0 asks for more than all buffers hold and reads none of it.
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				b := make([]byte, 1)
				if _, err := io.ReadFull(c, b); err != nil {
					return
				}
				n := size
				if b[0] == 's' {
					n = 256 << 20
				}
				_, _ = c.Write(make([]byte, n))
			}()
		}
	}()
	slow := g.connect(t, pub.Key)
	write(t, slow, "s")
	readN(t, slow, 1)
	var wg sync.WaitGroup
	for range flows - 1 {
		c := g.connect(t, pub.Key)
		wg.Go(func() {
			if _, err := io.WriteString(c, "f"); err != nil {
				t.Errorf("write: %v", err)
				return
			}
			if n, err := io.Copy(io.Discard, c); n != size || err != nil {
				t.Errorf("a flow beside a slow one read %d bytes, %v; want %d", n, err, size)
			}
		})
	}
	wg.Wait()
	Reset(slow)
}

func TestManyFlowsLeaveNothing(t *testing.T) {
	ln, pub := listen(t)
	g := newGuest(t, ServerOptions{}, pub)
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				// Not by splice(2): its pipes stay in a pool.
				_, _ = io.Copy(struct{ io.Writer }{c}, struct{ io.Reader }{c})
				_ = c.Close()
			}()
		}
	}()
	flow := func() {
		stream, reply := g.open(t, pub.Key, "")
		if reply.Status != wire.FlowOK {
			t.Fatalf("reply = %+v", reply)
		}
		write(t, stream, "x")
		if err := stream.CloseWrite(); err != nil {
			t.Fatal(err)
		}
		readAll(t, stream)
		_ = stream.Close()
	}
	flow()
	eventually(t, "the first flow is gone", func() bool { return g.Stats().OpenTCP == 0 })
	baseFDs, baseGoroutines := fds(t), runtime.NumGoroutine()
	for range 2000 {
		flow()
	}
	eventually(t, "all flows are gone", func() bool { return g.Stats().OpenTCP == 0 })
	eventually(t, "goroutines are back", func() bool { return runtime.NumGoroutine() <= baseGoroutines })
	eventually(t, "descriptors are back", func() bool {
		runtime.GC() // closes the pipes of a pool
		return fds(t) <= baseFDs
	})
	if got := g.Stats(); got.OK != 2001 || got.ToGuest != 2001 || got.ToHost != 2001 {
		t.Errorf("stats = %+v", got)
	}
}

func TestReplies(t *testing.T) {
	refused := closedPort(t)
	_, good := listen(t)
	own := netip.MustParseAddrPort("127.0.0.1:9")
	dead := netip.MustParseAddrPort("192.0.2.1:80")
	target := good.Dial[0]
	for _, tc := range []struct {
		name   string
		dial   []netip.AddrPort
		status wire.FlowStatus
		reason string
	}{
		{"works", []netip.AddrPort{target}, wire.FlowOK, ""},
		{"nothing accepts", []netip.AddrPort{refused}, wire.FlowRefused, "refused"},
		{"no target", nil, wire.FlowRefused, "nothing is known"},
		{"no answer", []netip.AddrPort{dead}, wire.FlowUnreachable, "timeout"},
		{"our own", []netip.AddrPort{own}, wire.FlowRefused, "fairlead itself"},
		{"the second works", []netip.AddrPort{own, dead, refused, target}, wire.FlowOK, ""},
		{"refused says more than no answer", []netip.AddrPort{dead, refused, dead}, wire.FlowRefused, ";"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			good.Dial = tc.dial
			g := newGuest(t, ServerOptions{
				Own: func(p port.Protocol, a netip.AddrPort) bool { return p == port.TCP && a == own },
				Dial: func(ctx context.Context, network string, a netip.AddrPort) (net.Conn, error) {
					switch a {
					case own:
						return nil, errors.New("dialled ourselves")
					case dead:
						return nil, fmt.Errorf("dial %s: i/o timeout", a)
					}
					return new(net.Dialer).DialContext(ctx, network, a.String())
				},
			}, good)
			stream, reply := g.open(t, good.Key, "127.0.0.1:1")
			defer stream.Close()
			if reply.Status != tc.status || !strings.Contains(reply.Reason, tc.reason) {
				t.Errorf("reply = %+v, want %s with %q", reply, tc.status, tc.reason)
			}
		})
	}
}

func TestTargetOrder(t *testing.T) {
	v4a, v4b := netip.MustParseAddrPort("127.0.0.1:80"), netip.MustParseAddrPort("10.0.0.1:80")
	v6a, v6b := netip.MustParseAddrPort("[::1]:80"), netip.MustParseAddrPort("[fd00::1]:80")
	pub := port.Publication{Fact: port.Fact{Key: tcpKey(80)}, Dial: []netip.AddrPort{v6a, v4a, v6b, v4b}}
	s, err := NewServer(ServerOptions{})
	if err != nil {
		t.Fatal(err)
	}
	client4, client6 := netip.MustParseAddrPort("127.0.0.1:1"), netip.MustParseAddrPort("[::1]:1")
	for _, tc := range []struct {
		name   string
		peer   netip.AddrPort
		worked netip.AddrPort
		want   []netip.AddrPort
	}{
		{"unknown peer", netip.AddrPort{}, netip.AddrPort{}, pub.Dial},
		{"IPv4", client4, netip.AddrPort{}, []netip.AddrPort{v4a, v4b, v6a, v6b}},
		{"mapped IPv4", netip.MustParseAddrPort("[::ffff:127.0.0.1]:1"), netip.AddrPort{}, []netip.AddrPort{v4a, v4b, v6a, v6b}},
		{"IPv6", client6, netip.AddrPort{}, []netip.AddrPort{v6a, v6b, v4a, v4b}},
		{"one worked", client4, v6b, []netip.AddrPort{v6b, v4a, v4b, v6a}},
		{"for the other family nothing is remembered", client6, netip.AddrPort{}, []netip.AddrPort{v6a, v6b, v4a, v4b}},
	} {
		if tc.worked.IsValid() {
			s.worked(Request{Publication: pub, Peer: tc.peer}, tc.worked)
		}
		if got := s.targets(Request{Publication: pub, Peer: tc.peer}); !slices.Equal(got, tc.want) {
			t.Errorf("%s: targets = %v, want %v", tc.name, got, tc.want)
		}
	}
}

func TestWorkingTargetIsRemembered(t *testing.T) {
	_, pub := listen(t)
	bad := closedPort(t)
	pub.Dial = []netip.AddrPort{bad, pub.Dial[0]}
	var mu sync.Mutex
	var dialled []netip.AddrPort
	g := newGuest(t, ServerOptions{Dial: func(ctx context.Context, network string, a netip.AddrPort) (net.Conn, error) {
		mu.Lock()
		dialled = append(dialled, a)
		mu.Unlock()
		return new(net.Dialer).DialContext(ctx, network, a.String())
	}}, pub)
	for range 2 {
		stream, reply := g.open(t, pub.Key, "127.0.0.1:1")
		if reply.Status != wire.FlowOK {
			t.Fatalf("reply = %+v", reply)
		}
		_ = stream.Reset()
	}
	mu.Lock()
	defer mu.Unlock()
	if want := []netip.AddrPort{bad, pub.Dial[1], pub.Dial[1]}; !slices.Equal(dialled, want) {
		t.Errorf("dialled %v, want %v", dialled, want)
	}
}

func TestDialTimesOut(t *testing.T) {
	_, pub := listen(t)
	g := newGuest(t, ServerOptions{
		DialTimeout: time.Millisecond,
		Dial: func(ctx context.Context, _ string, _ netip.AddrPort) (net.Conn, error) {
			<-ctx.Done()
			return nil, ctx.Err()
		},
	}, pub)
	if _, reply := g.open(t, pub.Key, ""); reply.Status != wire.FlowUnreachable {
		t.Errorf("reply = %+v", reply)
	}
}
