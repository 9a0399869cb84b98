// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/config/rules"
	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/link/wire"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/testkit/ports"
)

var web = port.Owner{Kind: port.OwnerContainer, ID: "1", Name: "web"}

// ownedBy returns a publication of an owner.
func ownedBy(k port.Key, o port.Owner, hosts ...netip.AddrPort) port.Fact {
	p := pub(k, hosts...)
	p.Owner = o
	return p
}

func reachOf(k port.Key) Reach {
	return Reach{ID: ID{"vm", k}, Owner: web, At: netip.AddrPortFrom(lo4, 80)}
}

// What the rules open can be reached without a listener of its own: the host port is in use.
func TestReach(t *testing.T) {
	eachWay(t, func(t *testing.T) {
		ln, err := net.Listen("tcp4", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer ln.Close()
		k := key(port.TCP, any4, ln.Addr().(*net.TCPAddr).AddrPort().Port())
		a := newAgent(t, "vm")
		a.greeter(k, "hello")
		a.begins(snapshot(1, ownedBy(k, web)))
		h, _ := start(t, Options{}, a)
		a.wants(k, port.Conflict)
		conn, err := h.Dial(t.Context(), t.Context(), reachOf(k))
		if err != nil {
			t.Fatal(err)
		}
		if b, err := io.ReadAll(conn); err != nil || string(b) != "hello" {
			t.Errorf("%q, %v", b, err)
		}
		if s := h.Stats(); s.OpenTCP != 1 || h.Guests()[0].Flows != 1 {
			t.Errorf("open: %+v", s)
		}
		_ = conn.Close()
		_ = conn.Close()
		if s := h.Stats(); s.OpenTCP != 0 || s.OK != 1 || s.ToHost != 5 || h.Guests()[0].Flows != 0 {
			t.Errorf("after the end: %+v", s)
		}
	})
}

// dialled returns a connection to a publication, the host that dialled it, and the listener of
// its server.
func dialled(t *testing.T) (*Host, Reach, net.Listener, link.Stream) {
	t.Helper()
	ln, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ln.Close() })
	k := key(port.TCP, any4, ports.Free(t))
	a := newAgent(t, "vm")
	a.serve(k, ln.Addr().(*net.TCPAddr).AddrPort())
	a.begins(snapshot(1, ownedBy(k, web)))
	h, _ := start(t, Options{}, a)
	a.wants(k, port.Active)
	conn, err := h.Dial(t.Context(), t.Context(), reachOf(k))
	if err != nil {
		t.Fatal(err)
	}
	return h, reachOf(k), ln, conn
}

// What was reached can be reset, which takes it out of the books.
func TestReachedIsReset(t *testing.T) {
	eachWay(t, func(t *testing.T) {
		h, _, ln, conn := dialled(t)
		server, err := ln.Accept()
		if err != nil {
			t.Fatal(err)
		}
		defer server.Close()
		for range 2 {
			_ = conn.Reset()
		}
		_ = server.SetDeadline(time.Now().Add(patience))
		if b, err := io.ReadAll(server); !isReset(err) {
			t.Errorf("the server read %q, %v, want a reset", b, err)
		}
		if s := h.Stats(); s.OpenTCP != 0 || h.Guests()[0].Flows != 0 {
			t.Errorf("after the reset: %+v", s)
		}
	})
}

func TestReachIsRefused(t *testing.T) {
	n := ports.Free(t)
	open, denied, moved := key(port.TCP, any4, n), key(port.TCP, lo4, n+1), key(port.TCP, lo4, n+2)
	a := newAgent(t, "vm")
	for _, k := range []port.Key{open, denied, moved} {
		a.greeter(k, "hello")
	}
	other := port.Owner{Kind: port.OwnerContainer, ID: "2", Name: "web"}
	a.begins(snapshot(1, ownedBy(open, web), ownedBy(denied, web), ownedBy(moved, other)))
	h, _ := start(t, Options{Policy: policy(t, rules.Loopback(), rules.Rule{
		Deny: true, Match: rules.Match{Ports: []rules.PortRange{{First: n + 1, Last: n + 1}}},
	})}, a)
	a.wants(denied, port.Denied)
	a.wants(open, port.Active)
	for what, c := range map[string]struct {
		r    Reach
		want error
	}{
		"denied":            {reachOf(denied), ErrDenied},
		"of another owner":  {reachOf(moved), errOwner},
		"not published":     {reachOf(key(port.TCP, lo4, n+3)), ErrWithdrawn},
		"of no guest":       {Reach{ID: ID{"other", open}, Owner: web, At: netip.AddrPortFrom(lo4, 80)}, ErrWithdrawn},
		"not open so wide":  {Reach{ID: ID{"vm", open}, Owner: web, At: netip.AddrPortFrom(lan, 80)}, errWider},
		"without a address": {Reach{ID: ID{"vm", open}, Owner: web}, errWider},
	} {
		if _, err := h.Dial(t.Context(), t.Context(), c.r); !errors.Is(err, c.want) {
			t.Errorf("a port that is %s: %v, want %v", what, err, c.want)
		}
	}
}

// A denial resets what was reached by a name, as it resets other connections.
func TestReachedEndsWithADenial(t *testing.T) {
	h, to, _, conn := dialled(t) // nobody accepts it
	near, far := net.Pipe()
	carried := make(chan error, 1)
	go func() { carried <- h.Carry(context.Background(), far, []byte("hello"), to) }()
	eventually(t, "both are carried", func() bool { return h.Stats().OK == 2 })
	h.SetPolicy(policy(t, rules.Loopback(), rules.Rule{Deny: true}))
	if _, err := conn.Read(make([]byte, 1)); err == nil || errors.Is(err, io.EOF) {
		t.Errorf("read: %v, want a reset", err)
	}
	_ = conn.Close()
	if err := <-carried; !errors.Is(err, errDenied) {
		t.Errorf("carried: %v", err)
	}
	_ = near.Close()
	eventually(t, "nothing is open", func() bool { return h.Stats().OpenTCP == 0 && h.Guests()[0].Flows == 0 })
}

// The guest is told who connected to which address, also of a client that comes by a name.
func TestFlowsTellTheirAddresses(t *testing.T) {
	k := key(port.TCP, any4, ports.Free(t))
	a := newAgent(t, "vm")
	a.begins(snapshot(1, ownedBy(k, web)))
	asked := make(chan wire.FlowRequest, 1)
	a.onFlow = func(s link.Stream, q wire.FlowRequest) bool {
		asked <- q
		_ = wire.WriteReply(s, wire.FlowReply{Status: wire.FlowOK})
		_ = s.Close()
		return true
	}
	h, _ := start(t, Options{}, a)
	o := a.wants(k, port.Active)
	c, err := net.Dial("tcp", o.HostAddress.String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if q := <-asked; q.Peer.String() != c.LocalAddr().String() || q.At != o.HostAddress {
		t.Errorf("%+v, want %s at %s", q, c.LocalAddr(), o.HostAddress)
	}
	near, far := net.Pipe()
	defer near.Close()
	r := reachOf(k)
	r.Peer = netip.MustParseAddrPort("192.0.2.1:50000")
	go func() { _ = h.Carry(t.Context(), far, nil, r) }()
	if q := <-asked; q.Peer != r.Peer || q.At != r.At {
		t.Errorf("%+v, want %s at %s", q, r.Peer, r.At)
	}
}

// The owner changes while the server is dialled: no byte reaches the new one.
func TestReachLooksAgain(t *testing.T) {
	k := key(port.TCP, any4, ports.Free(t))
	a := newAgent(t, "vm")
	a.begins(snapshot(1, ownedBy(k, web)))
	var h *Host
	a.onFlow = func(s link.Stream, q wire.FlowRequest) bool {
		a.say(put(1, ownedBy(k, port.Owner{Kind: port.OwnerContainer, ID: "2", Name: "new"})))
		eventually(t, "the port is another's", func() bool {
			p, _ := h.View().Get(ID{"vm", k})
			return p.Owner.ID == "2"
		})
		_ = wire.WriteReply(s, wire.FlowReply{Status: wire.FlowOK})
		if b, err := io.ReadAll(s); err == nil || len(b) > 0 {
			t.Errorf("the new server got %q, %v", b, err)
		}
		return true
	}
	h, _ = start(t, Options{}, a)
	a.wants(k, port.Active)
	_, far := net.Pipe()
	if err := h.Carry(t.Context(), far, []byte("secret"), reachOf(k)); !errors.Is(err, errOwner) || !errors.Is(err, ErrNotReached) {
		t.Errorf("carried: %v", err)
	}
}

// What this program has at one address of localhost it has at both.
func TestHeldAtBothFamilies(t *testing.T) {
	for _, c := range []struct {
		held string
		free string // of the addresses below, those that a publication gets
	}{
		{"127.0.0.1:80", "127.0.0.2:80 192.0.2.1:80 [2001:db8::1]:80"},
		{"[::1]:80", "127.0.0.2:80 192.0.2.1:80 [2001:db8::1]:80"},
		{"0.0.0.0:80", "[2001:db8::1]:80"},
		{"[::]:80", "127.0.0.2:80 192.0.2.1:80"},
		{"127.0.0.2:80", "127.0.0.1:80 [::1]:80 [::]:80 192.0.2.1:80 [2001:db8::1]:80"},
		{"192.0.2.1:80", "127.0.0.1:80 127.0.0.2:80 [::1]:80 [::]:80 [2001:db8::1]:80"},
	} {
		h := &Host{opt: Options{Held: []Held{{At: netip.MustParseAddrPort(c.held)}}}}
		var free []string
		for _, at := range []string{
			"127.0.0.1:80", "127.0.0.2:80", "0.0.0.0:80", "[::1]:80", "[::]:80", "192.0.2.1:80", "[2001:db8::1]:80",
		} {
			if _, ok := h.heldFor(port.TCP, netip.MustParseAddrPort(at)); !ok {
				free = append(free, at)
			}
		}
		if got := strings.Join(free, " "); got != c.free {
			t.Errorf("%s is held: %s are free, want %s", c.held, got, c.free)
		}
		for _, protocol := range []port.Protocol{port.TCP, port.UDP} {
			if _, ok := h.heldFor(protocol, at(lo4, 81)); ok {
				t.Errorf("%s is held, and so is 81/%s", c.held, protocol)
			}
		}
	}
}

// No publication gets an address at which this program itself listens.
func TestHeldAddresses(t *testing.T) {
	k := key(port.TCP, any4, ports.Free(t))
	a := newAgent(t, "vm")
	a.begins(snapshot(1, pub(k, at(lo4, k.Port), at(any4, k.Port))))
	h, _ := start(t, Options{Policy: exposeAll(t), Held: []Held{{At: at(lo4, k.Port), By: "names"}}}, a)
	o := a.wants(k, port.Conflict)
	if want := at(lo4, k.Port).String() + " is held by names"; o.Reason.String() != want {
		t.Errorf("reason %q, want %q", o.Reason, want)
	}
	if !refused(t, at(lo4, k.Port)) {
		t.Error("the port is open")
	}
	if next := h.next(); !next.IsZero() && next.Before(time.Now().Add(conflictMax)) {
		t.Errorf("it is tried again at %s", next)
	}
}

func TestWhyNot(t *testing.T) {
	ln, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	_, err = net.Listen("tcp4", ln.Addr().String())
	if got := WhyNot(err, at(lo4, 80), "--names"); !strings.HasPrefix(got, "127.0.0.1:80 is in use") || !strings.Contains(got, "--names") {
		t.Errorf("in use: %s", got)
	}
	_, err = net.Listen("tcp4", "192.0.2.1:80")
	if got := WhyNot(err, at(netip.MustParseAddr("192.0.2.1"), 80), "--names"); !strings.Contains(got, "192.0.2.1 is not an address") {
		t.Errorf("no address: %s", got)
	}
}
