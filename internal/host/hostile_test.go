// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/link/wire"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/testkit/ports"
)

// A guest that publishes every port gets as many as the limit allows, and failed
// outcomes for the others. It cannot take the addresses of other guests.
func TestGuestThatPublishesEveryPortIsLimited(t *testing.T) {
	synctest.Test(t, testGuestThatPublishesEveryPortIsLimited) // on a busy machine 65,535 ports take longer than a test waits
}

func testGuestThatPublishesEveryPortIsLimited(t *testing.T) {
	modest, greedy := newAgent(t, "modest"), newAgent(t, "greedy")
	k := key(port.TCP, any4, 80)
	modest.begins(snapshot(1, pub(k)))
	var all []port.Fact
	for p := 1; p <= 65535; p++ {
		all = append(all, pub(key(port.TCP, any4, uint16(p))))
	}
	greedy.drop(errors.New("not yet"))
	flooding(greedy, parts(1, 500, all...))
	network := newMemory()
	h, stop := start(t, Options{Network: network, Holders: named{}}, modest, greedy)
	defer stop()
	modest.wants(k, port.Active)
	greedy.up()
	greedy.settled(1)
	if n := h.Stats().Listeners; n != 4096 { // one of the modest, and one less as that port is taken
		t.Errorf("%d listeners are open, want 4096", n)
	}
	if o := greedy.wants(key(port.TCP, any4, 65535), port.Failed); !strings.Contains(o.Reason.String(), "limit of 4096") {
		t.Errorf("reason = %q", o.Reason)
	}
	if o := greedy.wants(k, port.Conflict); o.Reason.Code() != port.HeldElsewhere {
		t.Errorf("reason = %q", o.Reason)
	}
	// It withdraws all: nothing is left.
	greedy.say(snapshot(2))
	greedy.settled(2)
	if n := h.Stats().Listeners; n != 1 {
		t.Errorf("%d listeners are open, want the other guest's", n)
	}
}

// Clients over the limit are reset; the guest's other ports and the control channel
// go on.
func TestFlowsOverTheLimitAreReset(t *testing.T) { eachWay(t, testFlowsOverTheLimitAreReset) }

func testFlowsOverTheLimitAreReset(t *testing.T) {
	a := newAgent(t, "vm")
	k := key(port.TCP, any4, ports.Free(t))
	ln, err := net.Listen("tcp4", "127.0.0.1:0") // it never accepts
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	a.serve(k, ln.Addr().(*net.TCPAddr).AddrPort())
	a.begins(snapshot(1, pub(k)))
	const limit, tries = 50, 2000
	h, _ := start(t, Options{MaxFlows: limit}, a)
	a.wants(k, port.Active)
	base := runtime.NumGoroutine()
	var held []net.Conn
	defer func() {
		for _, c := range held {
			_ = c.Close()
		}
	}()
	for range tries {
		c, err := net.Dial("tcp4", at(lo4, k.Port).String())
		if err != nil {
			continue // reset before it stood
		}
		held = append(held, c)
	}
	eventually(t, "the rest is turned away", func() bool { return h.Stats().OverLimit >= tries-limit })
	if n := h.Stats().OpenTCP; n > limit {
		t.Errorf("%d flows are open, want at most %d", n, limit)
	}
	eventually(t, "goroutines are few", func() bool { return runtime.NumGoroutine() <= base+20*limit })
	a.say(put(1, pub(key(port.TCP, any4, 1), at(lo4, 0))))
	a.settled(2)
}

// A guest that sends malformed messages as fast as it can is disconnected, and tried
// again with backoff: it costs next to nothing.
func TestFloodOfMalformedMessagesEndsTheSession(t *testing.T) {
	for name, valid := range map[string]bool{"all of it": false, "with something valid now and then": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a := newAgent(t, "vm")
				bad := wire.Frame{Table: "outcomes"}
				part := snapshot(1)
				part.More = true
				var flood []wire.Frame
				for range 2000 {
					flood = append(flood, part, bad)
					if valid {
						flood = append(flood, snapshot(1))
					}
				}
				h, stop := start(t, Options{Network: newMemory(), BackoffMin: 100 * time.Millisecond, BackoffMax: 10 * time.Second},
					flooding(a, flood))
				time.Sleep(10 * time.Minute)
				synctest.Wait()
				a.mu.Lock()
				dials := a.dials
				a.mu.Unlock()
				if dials < 2 || dials > 150 {
					t.Errorf("%d sessions in 10 minutes", dials)
				}
				if n := h.Stats().Resyncs; n > uint64(dials)*31 {
					t.Errorf("%d resyncs in %d sessions", n, dials)
				}
				stop()
			})
		})
	}
}

// flooding has an agent send messages from the start, more than a session holds
// unread, whatever becomes of them.
func flooding(a *agent, cs []wire.Frame) *agent {
	a.onSession = func(s link.Session) {
		for _, c := range cs {
			if sendFrame(s, c) != nil {
				return
			}
		}
	}
	return a
}

// Only an agent that proves the token can open ports.
func TestGuestWithoutTokenIsRefused(t *testing.T) {
	token := func(s string) link.Token {
		v, err := link.NewToken(strings.Repeat(s, 32))
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
	for name, theirs := range map[string]link.Token{"another": token("x"), "none": {}} {
		t.Run(name, func(t *testing.T) {
			opened := new(watched)
			var wg sync.WaitGroup
			defer wg.Wait()
			h, stop := startGuests(t, Options{Network: opened, Guests: []Guest{{
				Name: "impostor",
				Dial: func(ctx context.Context) (link.Session, error) {
					near, far := net.Pipe()
					wg.Go(func() {
						o := link.Options{Role: link.RoleAgent, Identity: "a", Token: theirs, Logger: slog.New(slog.DiscardHandler)}
						s, err := link.Server(ctx, far, o)
						if err != nil {
							// It goes on as if it had been accepted.
							f := snapshot(1, pub(key(port.TCP, any4, 8080), netip.AddrPortFrom(lo4, 0)))
							b, _ := wire.EncodeFrame(&f)
							_, _ = far.Write(b)
							_ = far.Close()
							return
						}
						t.Error("the impostor was believed")
						_ = s.Close()
					})
					return link.Client(ctx, near, link.Options{
						Role: link.RoleHost, Identity: "h", Token: token("k"), Logger: slog.New(slog.DiscardHandler),
					})
				},
			}}})
			eventually(t, "the reason is shown", func() bool { return strings.Contains(h.Guests()[0].Error, "refused") })
			if g := h.Guests()[0]; g.Connected || g.Publications != 0 || opened.count() != 0 {
				t.Errorf("guest %+v, opened %d", g, opened.count())
			}
			stop()
		})
	}
}
