// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/config/rules"
	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/link/forward"
	"github.com/fairlead/fairlead/internal/link/own"
	"github.com/fairlead/fairlead/internal/link/wire"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/testkit/ports"
)

func isReset(err error) bool { return errors.Is(err, syscall.ECONNRESET) }

func TestOptions(t *testing.T) {
	dial := func(context.Context) (link.Session, error) { return nil, errors.New("no") }
	for _, o := range []Options{
		{Guests: []Guest{{Dial: dial}}},
		{Guests: []Guest{{Name: "a"}}},
		{Guests: []Guest{{Name: "a", Dial: dial}, {Name: "a", Dial: dial}}},
		{UDPIdle: -1},
		{BackoffMin: -1},
		{MaxListeners: -1},
	} {
		if _, err := New(o); err == nil {
			t.Errorf("New(%+v) gave no error", o)
		}
	}
}

func TestRunOnce(t *testing.T) {
	h, stop := start(t, Options{})
	stop()
	if err := h.Run(t.Context()); err == nil {
		t.Error("the second Run gave no error")
	}
}

func TestPublishServeWithdraw(t *testing.T) { eachWay(t, testPublishServeWithdraw) }

func testPublishServeWithdraw(t *testing.T) {
	a := newAgent(t, "vm")
	p := ports.Free(t)
	k := key(port.TCP, any4, p)
	a.greeter(k, "hello")
	a.begins(snapshot(7, pub(k)))
	h, _ := start(t, Options{}, a)
	a.settled(7)
	o := a.wants(k, port.Active)
	if o.HostAddress != at(lo4, p) {
		t.Errorf("host address = %s", o.HostAddress)
	}
	if got := greeting(t, o.HostAddress); got != "hello" {
		t.Errorf("greeting = %q", got)
	}
	got, ok := h.View().Get(ID{"vm", k})
	if !ok || got.State() != port.Active || got.Source != "socket" || got.Since.IsZero() {
		t.Errorf("view = %+v, %v", got, ok)
	}
	if g := h.Guests(); len(g) != 1 || !g[0].Connected || g[0].Generation != 7 || g[0].Publications != 1 {
		t.Errorf("guests = %+v", g)
	}
	a.say(removed(7, k))
	a.settled(8)
	if !refused(t, at(lo4, p)) {
		t.Error("the port is open though withdrawn")
	}
	if n := h.View().Len(); n != 0 {
		t.Errorf("%d publications left", n)
	}
	eventually(t, "no flow is left", func() bool { return h.Stats().OpenTCP == 0 })
	if s := h.Stats(); s.OK != 1 || s.ToHost != 5 || s.Listeners != 0 {
		t.Errorf("stats = %+v", s)
	}
}

// Both families of a port get one number where any is asked for, also if one comes later.
func TestBothFamiliesAndAnyPort(t *testing.T) {
	k4, k6, other := key(port.TCP, any4, 80), key(port.TCP, any6, 80), key(port.TCP, any6, 81)
	for name, later := range map[string][]port.Fact{"at once": nil, "IPv6 later": {pub(k6, at(lo6, 0))}, "IPv4 later": {pub(k4, at(lo4, 0))}} {
		t.Run(name, func(t *testing.T) {
			a := newAgent(t, "vm")
			first := []port.Fact{pub(other, at(lo6, 0))}
			for k, h := range map[port.Key]netip.Addr{k4: lo4, k6: lo6} {
				a.greeter(k, "hello")
				if len(later) == 0 || later[0].Key != k {
					first = append(first, pub(k, at(h, 0)))
				}
			}
			a.begins(snapshot(1, first...))
			start(t, Options{}, a)
			a.settled(1)
			if len(later) > 0 {
				a.say(put(1, later...))
			}
			four, six := a.wants(k4, port.Active).HostAddress, a.wants(k6, port.Active).HostAddress
			if four.Addr() != lo4 || six.Addr() != lo6 || four.Port() == 0 || four.Port() != six.Port() {
				t.Errorf("open at %s and %s, want one number", four, six)
			}
			for _, o := range []netip.AddrPort{four, six} {
				if got := greeting(t, o); got != "hello" {
					t.Errorf("greeting at %s = %q", o, got)
				}
			}
			if o := a.wants(other, port.Active).HostAddress; o.Port() == four.Port() {
				t.Errorf("another port has the number as well: %s", o)
			}
		})
	}
}

// Where any free port is asked for and the number of the other family is taken, it is another one.
func TestAnyPortWhoseNumberIsTaken(t *testing.T) {
	k4, k6 := key(port.TCP, any4, 80), key(port.TCP, any6, 80)
	a := newAgent(t, "vm")
	a.greeter(k6, "hello")
	a.begins(snapshot(1, pub(k4, at(lo4, 0))))
	network := new(taken)
	start(t, Options{Network: network}, a)
	four := a.wants(k4, port.Active).HostAddress
	network.address.Store(at(lo6, four.Port()).String())
	a.say(put(1, pub(k6, at(lo6, 0))))
	six := a.wants(k6, port.Active).HostAddress
	if six.Port() == 0 || six.Port() == four.Port() {
		t.Errorf("open at %s and %s", four, six)
	}
	if got := greeting(t, six); got != "hello" {
		t.Errorf("greeting = %q", got)
	}
}

// taken is a Network of which somebody else has one address.
type taken struct {
	own.Sockets
	address atomic.Value
}

func (n *taken) Listen(ctx context.Context, network, address string) (net.Listener, error) {
	if n.address.Load() == address {
		return nil, &net.OpError{Op: "listen", Net: network, Err: os.NewSyscallError("bind", syscall.EADDRINUSE)}
	}
	return n.Sockets.Listen(ctx, network, address)
}

func TestNeverWider(t *testing.T) {
	p := ports.Free(t)
	deny := rules.Rule{Name: "no", Deny: true}
	one, err := rules.ParseHostAddress("127.0.0.2")
	if err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		name   string
		policy Policy
		guest  netip.Addr
		asked  netip.Addr
		state  port.State
		want   netip.Addr
	}{
		{"default narrows a wildcard", nil, any4, any4, port.Active, lo4},
		{"default narrows an address", nil, lan, any4, port.Active, lo4},
		{"default keeps a loopback", nil, any4, netip.MustParseAddr("127.0.0.9"), port.Active, netip.MustParseAddr("127.0.0.9")},
		{"expose leaves it to the agent", exposeAll(t), any4, any4, port.Active, any4},
		{"expose does not widen", exposeAll(t), any4, lo4, port.Active, lo4},
		{"an address is not widened to all", policy(t, one), any4, any4, port.Active, netip.MustParseAddr("127.0.0.2")},
		{"a rule denies", policy(t, rules.Loopback(), deny), any4, lo4, port.Denied, netip.Addr{}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			a := newAgent(t, "vm")
			k := key(port.TCP, tc.guest, p)
			a.begins(snapshot(1, pub(k, at(tc.asked, p))))
			start(t, Options{Policy: tc.policy}, a)
			o := a.wants(k, tc.state)
			if o.HostAddress.Addr() != tc.want {
				t.Errorf("outcome = %+v, want %s", o, tc.want)
			}
			if tc.state == port.Denied && !strings.Contains(o.Reason.String(), "rule 1 (no)") {
				t.Errorf("reason = %q", o.Reason)
			}
		})
	}
}

func TestPolicyReload(t *testing.T) {
	eachWay(t, testPolicyReload)
}

func testPolicyReload(t *testing.T) {
	a := newAgent(t, "vm")
	kept, denied := key(port.TCP, any4, ports.Free(t)), key(port.TCP, any4, ports.Free(t))
	var target [2]net.Listener
	for i, k := range []port.Key{kept, denied} {
		ln, err := net.Listen("tcp4", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer ln.Close()
		target[i] = ln
		a.serve(k, ln.Addr().(*net.TCPAddr).AddrPort())
	}
	a.begins(snapshot(1, pub(kept), pub(denied)))
	net := new(watched)
	h, _ := start(t, Options{Network: net}, a)
	a.wants(kept, port.Active)
	a.wants(denied, port.Active)
	stays, cut := connect(t, at(lo4, kept.Port)), connect(t, at(lo4, denied.Port))
	for _, ln := range target {
		c, err := ln.Accept()
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if _, err := io.WriteString(c, "x"); err != nil {
			t.Fatal(err)
		}
	}
	b := make([]byte, 1)
	for _, c := range []io.Reader{stays, cut} {
		if _, err := io.ReadFull(c, b); err != nil {
			t.Fatal(err)
		}
	}
	ports, err := rules.ParsePorts(fmt.Sprint(denied.Port))
	if err != nil {
		t.Fatal(err)
	}
	h.SetPolicy(policy(t, rules.Loopback(), rules.Rule{Deny: true, Match: rules.Match{Ports: ports}}))
	a.wants(denied, port.Denied)
	if _, err := cut.Read(b); !isReset(err) {
		t.Errorf("read of a denied flow = %v, want a reset", err)
	}
	if !refused(t, at(lo4, denied.Port)) {
		t.Error("a denied port is open")
	}
	if n := net.count(); n != 2 {
		t.Errorf("%d listeners were opened, want 2: %v", n, net.opened)
	}
	if _, err := stays.Write([]byte("x")); err != nil {
		t.Errorf("write on a flow that is still allowed: %v", err)
	}
	// The client sees the reset before the flow is gone.
	eventually(t, "one flow is open", func() bool { return h.Guests()[0].Flows == 1 })
}

// A host rule that names an owner waits for it as the agent's do.
func TestHostRuleWaitsForTheOwner(t *testing.T) {
	a := newAgent(t, "vm")
	k := key(port.TCP, any4, ports.Free(t))
	p := pub(k)
	p.OwnerPending = true
	a.begins(snapshot(1, p))
	start(t, Options{Policy: policy(t, rules.Loopback(), rules.Rule{Match: rules.Match{Name: "secret*"}, Deny: true})}, a)
	o := a.wants(k, port.Pending)
	if o.Reason.String() != "owner not known yet" || !refused(t, at(lo4, k.Port)) {
		t.Errorf("outcome %+v", o)
	}
	p.OwnerPending, p.Owner = false, port.Owner{Kind: port.OwnerContainer, ID: "a", Name: "web"}
	a.say(snapshot(2, p))
	a.wants(k, port.Active)
	p.Owner.ID, p.Owner.Name = "b", "secret0"
	a.say(snapshot(3, p))
	a.wants(k, port.Denied)
}

// A host rule denies what the labels that the agent left out may make it match.
func TestHostRuleByLabelWhereLabelsAreLeftOut(t *testing.T) {
	k := key(port.TCP, any4, ports.Free(t))
	labels := map[string]string{"zone": "internal"}
	for i := range port.MaxLabels {
		labels[fmt.Sprint("a", i)] = "x" // before "zone"
	}
	owner := port.Owner{Kind: port.OwnerContainer, ID: "c", Name: "db", Labels: labels}
	sent := port.Fact{Key: k, Owner: owner, Decision: port.Decision{Allow: true, Host: []netip.AddrPort{at(lo4, k.Port)}}}.Fit()
	if len(sent.Owner.Labels) != port.MaxLabels || sent.Owner.Labels["zone"] != "" {
		t.Fatalf("sent are %d labels, zone %q", len(sent.Owner.Labels), sent.Owner.Labels["zone"])
	}
	a := newAgent(t, "vm")
	a.begins(snapshot(1, sent))
	h, _ := start(t, Options{Policy: policy(t, rules.Asked(), rules.Rule{Name: "internal", Match: rules.Match{Labels: map[string]string{"zone": "internal"}}, Deny: true})}, a)
	o := a.wants(k, port.Denied)
	if !strings.Contains(o.Reason.String(), "labels of its owner were left out") || !strings.Contains(o.Reason.String(), "host rule 1 (internal)") {
		t.Errorf("reason = %q", o.Reason)
	}
	if n := h.Stats().Listeners; n != 0 {
		t.Errorf("%d listeners are open", n)
	}
	// One that is too long does not hide that the other is not there.
	owner.Labels = map[string]string{"devcontainer.metadata": strings.Repeat("m", port.MaxLabelValue+1)}
	a.say(put(1, port.Fact{Key: k, Owner: owner, Decision: port.Decision{Allow: true, Host: sent.Decision.Host}}.Fit()))
	a.wants(k, port.Active)
	a.say(snapshot(3, sent))
	a.wants(k, port.Denied)
	// What all its labels show not to be meant is open.
	owner.Labels = map[string]string{"zone": "public"}
	a.say(put(3, port.Fact{Key: k, Owner: owner, Decision: port.Decision{Allow: true, Host: sent.Decision.Host}}.Fit()))
	a.wants(k, port.Active)
}

// A port is closed when its NAT rule comes to lead to a denied owner as well.
func TestHostRuleDeniesNATToDeniedOwner(t *testing.T) {
	a := newAgent(t, "vm")
	k := key(port.TCP, any4, ports.Free(t))
	p := pub(k)
	p.Owner = port.Owner{Kind: port.OwnerService, ID: "shop/web", Name: "web", Namespace: "shop"}
	a.begins(snapshot(1, p))
	start(t, Options{Policy: policy(t, rules.Loopback(), rules.Rule{Match: rules.Match{Name: "secret*"}, Deny: true})}, a)
	a.wants(k, port.Active)
	p.Others = []port.OtherOwner{{Owner: port.Owner{Kind: port.OwnerContainer, ID: "b", Name: "secret0"}}}
	a.say(snapshot(2, p))
	o := a.wants(k, port.Denied)
	if !strings.Contains(o.Reason.String(), "container secret0 serves it, too") {
		t.Errorf("reason %q", o.Reason)
	}
}

func TestConflictIsTakenOver(t *testing.T) {
	for _, proto := range []port.Protocol{port.TCP, port.UDP} {
		t.Run(proto.String(), func(t *testing.T) {
			var s own.Sockets
			var holder io.Closer
			var p uint16
			if proto == port.TCP {
				ln, err := s.Listen(t.Context(), "tcp4", "127.0.0.1:0")
				if err != nil {
					t.Fatal(err)
				}
				holder, p = ln, ln.Addr().(*net.TCPAddr).AddrPort().Port()
			} else {
				pc, err := s.ListenPacket(t.Context(), "udp4", "127.0.0.1:0")
				if err != nil {
					t.Fatal(err)
				}
				holder, p = pc, pc.LocalAddr().(*net.UDPAddr).AddrPort().Port()
			}
			a := newAgent(t, "vm")
			k := key(proto, any4, p)
			a.begins(snapshot(1, pub(k)))
			holders := named{Holder{PID: 4711, Name: "nginx"}}
			start(t, Options{Holders: holders}, a)
			o := a.wants(k, port.Conflict)
			if o.HostAddress != at(lo4, p) {
				t.Errorf("host address = %s", o.HostAddress)
			}
			eventually(t, "the holder is named", func() bool {
				return strings.Contains(a.heard(k)[0].Reason.String(), `"nginx" (pid 4711)`)
			})
			if err := holder.Close(); err != nil {
				t.Fatal(err)
			}
			if o := a.wants(k, port.Active); o.Reason.String() != "" {
				t.Errorf("reason = %q", o.Reason)
			}
		})
	}
}

// named is a HolderFinder that finds one process for all addresses.
type named struct{ Holder }

func (n named) Holders(_ context.Context, sockets []Socket) (map[Socket]Holder, error) {
	m := make(map[Socket]Holder)
	for _, s := range sockets {
		m[s] = n.Holder
	}
	return m, nil
}

func TestForbiddenPort(t *testing.T) {
	a := newAgent(t, "vm")
	k := key(port.TCP, any4, 80)
	a.begins(snapshot(1, pub(k)))
	start(t, Options{Network: failing{syscall.EACCES}}, a)
	if o := a.wants(k, port.Failed); !strings.Contains(o.Reason.String(), "`fairlead forward add 80/tcp --to 8080`") {
		t.Errorf("reason = %q, want the way out", o.Reason)
	}
	// Of several guests it is about one.
	b, c := newAgent(t, "b"), newAgent(t, "c")
	b.begins(snapshot(1, pub(k)))
	c.begins(snapshot(1))
	start(t, Options{Network: failing{syscall.EACCES}}, b, c)
	if o := b.wants(k, port.Failed); !strings.Contains(o.Reason.String(), "--to 8080 --guest b`") {
		t.Errorf("reason = %q, want the guest", o.Reason)
	}
}

// failing is a Network that opens nothing.
type failing struct{ err error }

func (f failing) Listen(context.Context, string, string) (net.Listener, error) { return nil, f.err }
func (f failing) ListenPacket(context.Context, string, string) (*own.UDPConn, error) {
	return nil, f.err
}

func TestTwoGuestsOnOnePort(t *testing.T) {
	p := ports.Free(t)
	first, second := newAgent(t, "first"), newAgent(t, "second")
	// The second would precede the first, which counts within one guest only.
	k1, k2 := key(port.TCP, lan, p), key(port.TCP, lo4, p)
	first.greeter(k1, "first")
	second.greeter(k2, "second")
	second.drop(errors.New("not yet"))
	first.begins(snapshot(1, pub(k1)))
	second.begins(snapshot(1, pub(k2)))
	h, _ := start(t, Options{Grace: -1}, first, second)
	first.wants(k1, port.Active)
	second.up()
	if o := second.wants(k2, port.Conflict); o.Reason.Code() != port.HeldElsewhere || strings.Contains(o.Reason.String(), k1.String()) {
		t.Errorf("reason = %q, want no word of what another guest has", o.Reason)
	}
	if p, _ := h.View().Get(ID{"second", k2}); !strings.Contains(p.Outcomes[0].Reason.String(), `guest "first"`) {
		t.Errorf("reason = %q, want the host to name the holder", p.Outcomes[0].Reason)
	}
	if got := greeting(t, at(lo4, p)); got != "first" {
		t.Errorf("greeting = %q", got)
	}
	first.say(removed(1, k1))
	second.wants(k2, port.Active)
	if got := greeting(t, at(lo4, p)); got != "second" {
		t.Errorf("greeting = %q", got)
	}
	// It comes back, after the other guest now.
	first.say(put(2, pub(k1)))
	first.wants(k1, port.Conflict)
	second.drop(errors.New("gone"))
	first.wants(k1, port.Active)
	if got := greeting(t, at(lo4, p)); got != "first" {
		t.Errorf("greeting = %q", got)
	}
	if _, ok := h.View().Get(ID{"second", k2}); ok {
		t.Error("what a lost guest published is shown after the grace period")
	}
}

func TestPrecedence(t *testing.T) {
	p := ports.Free(t)
	a := newAgent(t, "vm")
	specific, wildcard, loopback := key(port.TCP, lan, p), key(port.TCP, any4, p), key(port.TCP, lo4, p)
	for _, k := range []port.Key{specific, wildcard, loopback} {
		a.greeter(k, k.Address.String())
	}
	net := new(watched)
	a.begins(snapshot(1, pub(specific)))
	start(t, Options{Network: net}, a)
	a.wants(specific, port.Active)
	steps := []struct {
		change wire.Frame
		winner port.Key
		losers []port.Key
	}{
		{put(1, pub(wildcard)), wildcard, []port.Key{specific}},
		{put(2, pub(loopback)), loopback, []port.Key{specific, wildcard}},
		{removed(3, loopback), wildcard, []port.Key{specific}},
		{removed(4, wildcard), specific, nil},
	}
	for _, s := range steps {
		a.say(s.change)
		a.wants(s.winner, port.Active)
		for _, k := range s.losers { // that lost to another before, maybe
			eventually(t, fmt.Sprintf("%s loses to %s", k, s.winner), func() bool {
				o := a.wants(k, port.Conflict)
				return strings.Contains(o.Reason.String(), s.winner.String())
			})
		}
		if got := greeting(t, at(lo4, p)); got != s.winner.Address.String() {
			t.Errorf("greeting = %q, want %s", got, s.winner.Address)
		}
	}
	if n := net.count(); n != 1 {
		t.Errorf("%d listeners were opened for one address: %v", n, net.opened)
	}
}

// Publications of one guest port and one owner are no conflict: one of them serves
// the host address for all.
func TestPortsOfOneOwnerShareAnAddress(t *testing.T) {
	const service, process = port.OwnerService, port.OwnerProcess
	for _, proto := range []port.Protocol{port.TCP, port.UDP} {
		t.Run(proto.String(), func(t *testing.T) {
			p := ports.Free(t)
			a := newAgent(t, "vm")
			wildcard, loopback, specific := key(proto, any4, p), key(proto, lo4, p), key(proto, lan, p)
			of := func(k port.Key, kind port.OwnerKind, id string) port.Fact {
				w := pub(k)
				w.Owner = port.Owner{Kind: kind, ID: id, Name: id}
				return w
			}
			a.begins(snapshot(1, of(wildcard, service, "web"), of(loopback, port.OwnerUnknown, ""), of(specific, service, "web")))
			start(t, Options{}, a)
			a.wants(loopback, port.Active)
			a.wants(wildcard, port.Conflict)
			a.wants(specific, port.Conflict)
			for i, step := range []struct {
				change             wire.Frame
				wildcard, specific port.State
			}{
				{put(1, of(loopback, service, "web")), port.Active, port.Active},
				{put(2, of(loopback, service, "other")), port.Conflict, port.Conflict},
				{put(3, of(wildcard, service, "other")), port.Active, port.Conflict},
				{put(4, of(wildcard, process, "7")), port.Conflict, port.Conflict},
				{put(5, of(loopback, process, "7")), port.Active, port.Conflict},
				{put(6, of(specific, process, "7")), port.Active, port.Active},
				{removed(7, loopback), port.Active, port.Active},
				{put(8, of(specific, process, "8")), port.Active, port.Conflict},
				// A process in another pid namespace has a name and no id.
				{put(9, of(wildcard, process, ""), of(specific, process, "")), port.Active, port.Conflict},
			} {
				a.say(step.change)
				for k, want := range map[port.Key]port.State{wildcard: step.wildcard, specific: step.specific} {
					if o := a.wants(k, want); o.HostAddress != at(lo4, p) {
						t.Errorf("step %d: %s is %s at %s", i, k, o.State, o.HostAddress)
					}
				}
			}
			a.say(removed(10, wildcard))
			a.wants(specific, port.Active)
		})
	}
}

// The guest's localhost is the host's localhost, in whatever order they come.
func TestExactLoopbackPrecedesOtherLoopbackAddresses(t *testing.T) {
	p := ports.Free(t)
	exact, other := key(port.UDP, lo4, p), key(port.UDP, netip.MustParseAddr("127.0.0.53"), p)
	for _, order := range [][]port.Key{{exact, other}, {other, exact}} {
		a := newAgent(t, "vm")
		a.begins(snapshot(1, pub(order[0])))
		_, stop := start(t, Options{}, a)
		a.wants(order[0], port.Active)
		a.say(put(1, pub(order[1])))
		a.wants(exact, port.Active)
		if o := a.wants(other, port.Conflict); !strings.Contains(o.Reason.String(), exact.String()) {
			t.Errorf("reason = %q", o.Reason)
		}
		a.say(removed(2, exact))
		a.wants(other, port.Active)
		stop()
	}
}

// Somebody asked for exactly this host port: by a rule that names it, or by the name of a
// container. So that one gets it, in whatever order they come and whatever the numbers.
func TestWhatWasAskedForPrecedesPlainPorts(t *testing.T) {
	p := ports.Free(t)
	plain, forwarded, container := key(port.TCP, any4, p), key(port.TCP, any4, p-1), key(port.TCP, lan, p)
	higher := key(port.TCP, any4, p+1)
	byName := pub(container)
	byName.SetNamed("", []string{fmt.Sprintf("db:%d/tcp", p)})
	toPlain := func(k port.Key) port.Fact {
		w := pub(k)
		w.Decision.Host = []netip.AddrPort{at(lo4, p)}
		return w
	}
	for name, w := range map[string]port.Fact{"lower": toPlain(forwarded), "higher": toPlain(higher), "by name": byName} {
		for _, first := range []bool{true, false} {
			t.Run(fmt.Sprint(name, first), func(t *testing.T) {
				a := newAgent(t, "vm")
				order := []port.Fact{w, pub(plain)}
				if !first {
					slices.Reverse(order)
				}
				a.begins(snapshot(1, order[0]))
				_, stop := start(t, Options{}, a)
				defer stop()
				a.wants(order[0].Key, port.Active)
				a.say(put(1, order[1]))
				a.wants(w.Key, port.Active)
				if o := a.wants(plain, port.Conflict); !strings.Contains(o.Reason.String(), "is held by "+w.Key.String()) {
					t.Errorf("reason = %q", o.Reason)
				}
				a.say(removed(2, w.Key))
				a.wants(plain, port.Active)
			})
		}
	}
	// Asking by name for what is there already is enough.
	a := newAgent(t, "vm")
	a.begins(snapshot(1, pub(plain), pub(container)))
	start(t, Options{}, a)
	a.wants(plain, port.Active)
	a.wants(container, port.Conflict)
	a.say(put(1, byName))
	a.wants(container, port.Active)
	a.wants(plain, port.Conflict)
	a.say(put(2, pub(container)))
	a.wants(plain, port.Active)
	a.wants(container, port.Conflict)
}

// A NAT rule for two own addresses makes two publications without an owner.
func TestOneRuleIsNoConflictWithItself(t *testing.T) {
	p := ports.Free(t)
	a := newAgent(t, "vm")
	one, two, three := key(port.TCP, lan, p), key(port.TCP, lan.Next(), p), key(port.TCP, lan.Next().Next(), p)
	rule := func(k port.Key, id uint64) port.Fact { w := pub(k); w.Target = id; return w }
	a.begins(snapshot(1, rule(one, 1), rule(two, 1), rule(three, 2)))
	start(t, Options{}, a)
	a.wants(one, port.Active)
	a.wants(two, port.Active)
	a.wants(three, port.Conflict)
	a.say(put(1, rule(two, 2))) // it leads elsewhere now
	a.wants(two, port.Conflict)
	a.say(removed(2, one))
	a.wants(two, port.Active)
	a.wants(three, port.Active)
}

// One owner's publications for the loopback and for all addresses are served on all
// addresses, and on the loopback alone when the wider one leaves.
func TestWidestAddressOfOneOwnerServesAll(t *testing.T) {
	p := ports.Free(t)
	a := newAgent(t, "vm")
	of := func(w port.Fact) port.Fact {
		w.Owner = port.Owner{Kind: port.OwnerService, ID: "default/web", Name: "web"}
		return w
	}
	wide, narrow := key(port.TCP, any4, p), key(port.TCP, lo4, p)
	a.greeter(wide, "wide")
	a.greeter(narrow, "narrow")
	a.begins(snapshot(1, of(pub(narrow))))
	start(t, Options{Policy: exposeAll(t)}, a)
	a.wants(narrow, port.Active)
	a.say(put(1, of(pub(wide, at(any4, p)))))
	if o := a.wants(wide, port.Active); o.HostAddress != at(any4, p) {
		t.Errorf("%s is active at %s", wide, o.HostAddress)
	}
	if o := a.wants(narrow, port.Active); o.HostAddress != at(lo4, p) {
		t.Errorf("%s is active at %s", narrow, o.HostAddress)
	}
	other := at(netip.MustParseAddr("127.0.0.2"), p)
	for _, to := range []netip.AddrPort{other, at(lo4, p)} {
		if got := greeting(t, to); got != "wide" {
			t.Errorf("%s is served by %q", to, got)
		}
	}
	a.say(removed(2, wide))
	eventually(t, "only the loopback is open", func() bool { return refused(t, other) && !refused(t, at(lo4, p)) })
	if got := greeting(t, at(lo4, p)); got != "narrow" {
		t.Errorf("the loopback is served by %q", got)
	}
}

// One guest address is open to all, another only on the loopback: when the wider
// one leaves, nothing wider than the loopback stays.
func TestExposureNarrows(t *testing.T) {
	for _, proto := range []port.Protocol{port.TCP, port.UDP} {
		t.Run(proto.String(), func(t *testing.T) {
			p := ports.Free(t)
			a := newAgent(t, "vm")
			wide, narrow := key(proto, any4, p), key(proto, lan, p)
			a.begins(snapshot(1, pub(narrow, at(lo4, p)), pub(wide, at(any4, p))))
			start(t, Options{Policy: exposeAll(t)}, a)
			if o := a.wants(wide, port.Active); o.HostAddress != at(any4, p) {
				t.Errorf("host address = %s", o.HostAddress)
			}
			a.wants(narrow, port.Conflict)
			a.say(removed(1, wide))
			if o := a.wants(narrow, port.Active); o.HostAddress != at(lo4, p) {
				t.Errorf("host address = %s", o.HostAddress)
			}
			// Another loopback address takes the place of the network here.
			other := netip.MustParseAddr("127.0.0.2")
			if proto == port.TCP && !refused(t, at(other, p)) {
				t.Error("the port answers beyond the loopback address asked for")
			}
			if proto == port.UDP {
				pc, err := net.ListenUDP("udp4", net.UDPAddrFromAddrPort(at(other, p)))
				if err != nil {
					t.Errorf("the port is held beyond the loopback address asked for: %v", err)
				} else {
					_ = pc.Close()
				}
			}
			a.say(put(2, pub(wide, at(any4, p))))
			a.wants(wide, port.Active)
			a.wants(narrow, port.Conflict)
		})
	}
}

func TestConflictWithAnyFreePort(t *testing.T) {
	a := newAgent(t, "vm")
	free := key(port.TCP, any4, 80)
	a.begins(snapshot(1, pub(free, at(lo4, 0))))
	start(t, Options{}, a)
	p := a.wants(free, port.Active).HostAddress.Port()
	k := key(port.TCP, any4, p)
	a.say(put(1, pub(k)))
	if o := a.wants(k, port.Conflict); !strings.Contains(o.Reason.String(), free.String()) {
		t.Errorf("reason = %q, want it to name %s", o.Reason, free)
	}
	a.say(removed(2, free))
	a.wants(k, port.Active)
}

func TestReconnectKeepsListeners(t *testing.T) { eachWay(t, testReconnectKeepsListeners) }

func testReconnectKeepsListeners(t *testing.T) {
	a := newAgent(t, "vm")
	k, gone := key(port.TCP, any4, ports.Free(t)), key(port.TCP, any4, ports.Free(t))
	anyPort := key(port.TCP, lan, 81)
	a.greeter(k, "hello")
	a.begins(snapshot(3, pub(k), pub(gone), pub(anyPort, at(lo4, 0))))
	network := new(watched)
	h, _ := start(t, Options{Network: network, Grace: time.Hour}, a)
	a.settled(3)
	before := a.wants(anyPort, port.Active).HostAddress
	a.mu.Lock()
	clear(a.outcomes)
	a.mu.Unlock()

	a.drop(errors.New("restarting"))
	eventually(t, "the guest is lost", func() bool { return !h.Guests()[0].Connected })
	a.begins(snapshot(1, pub(k), pub(anyPort, at(lo4, 0))))
	a.up()
	a.settled(1)
	a.wants(k, port.Active)
	if after := a.wants(anyPort, port.Active).HostAddress; after != before {
		t.Errorf("any free port was %s and is %s", before, after)
	}
	if n := network.count(); n != 3 {
		t.Errorf("%d listeners were opened, want 3: %v", n, network.opened)
	}
	if !refused(t, at(lo4, gone.Port)) {
		t.Error("what the new snapshot lacks is open")
	}
	if got := greeting(t, at(lo4, k.Port)); got != "hello" {
		t.Errorf("greeting = %q", got)
	}
}

func TestConnectionWaitsForTheLink(t *testing.T) {
	eachWay(t, testConnectionWaitsForTheLink)
}

func testConnectionWaitsForTheLink(t *testing.T) {
	a := newAgent(t, "vm")
	k := key(port.TCP, any4, ports.Free(t))
	a.greeter(k, "hello")
	a.begins(snapshot(1, pub(k)))
	h, _ := start(t, Options{Grace: time.Hour, Hold: time.Hour}, a)
	a.wants(k, port.Active)
	a.drop(errors.New("restarting"))
	eventually(t, "the guest is lost", func() bool { return !h.Guests()[0].Connected })
	c := connect(t, at(lo4, k.Port))
	eventually(t, "the connection is held", func() bool { return h.Guests()[0].Flows == 1 })
	a.up()
	if b, err := io.ReadAll(c); err != nil || string(b) != "hello" {
		t.Errorf("read %q, %v", b, err)
	}
}

func TestConnectionIsResetWithoutLink(t *testing.T) {
	a := newAgent(t, "vm")
	k := key(port.TCP, any4, ports.Free(t))
	a.begins(snapshot(1, pub(k)))
	h, _ := start(t, Options{Grace: time.Hour, Hold: time.Millisecond}, a)
	a.wants(k, port.Active)
	a.drop(errors.New("gone"))
	eventually(t, "the guest is lost", func() bool { return !h.Guests()[0].Connected })
	if !wasReset(t, at(lo4, k.Port)) {
		t.Error("the connection is not reset")
	}
	if n := h.Stats().Unlinked; n != 1 {
		t.Errorf("Unlinked = %d, want 1", n)
	}
}

func TestRefusedFlowResetsTheClient(t *testing.T) { eachWay(t, testRefusedFlowResetsTheClient) }

func testRefusedFlowResetsTheClient(t *testing.T) {
	a := newAgent(t, "vm")
	k := key(port.TCP, any4, ports.Free(t))
	a.serve(k) // known, and nothing serves it
	a.begins(snapshot(1, pub(k)))
	h, _ := start(t, Options{}, a)
	a.wants(k, port.Active)
	if !wasReset(t, at(lo4, k.Port)) {
		t.Error("the connection is not reset")
	}
	if n := h.Stats().Refused; n != 1 {
		t.Errorf("Refused = %d, want 1", n)
	}
}

func TestGraceCloses(t *testing.T) {
	a := newAgent(t, "vm")
	k := key(port.TCP, any4, ports.Free(t))
	a.begins(snapshot(1, pub(k)))
	h, _ := start(t, Options{Grace: 10 * time.Millisecond, Hold: -1}, a)
	a.wants(k, port.Active)
	a.drop(errors.New("gone"))
	eventually(t, "the port is closed", func() bool { return refused(t, at(lo4, k.Port)) })
	eventually(t, "the table is empty", func() bool { return h.View().Len() == 0 })
	a.up()
	a.settled(1)
	eventually(t, "the port is open again", func() bool { return !refused(t, at(lo4, k.Port)) })
}

func TestListenerLimit(t *testing.T) {
	a := newAgent(t, "vm")
	var pubs []port.Fact
	for i := range 4 {
		pubs = append(pubs, pub(key(port.TCP, lo4, uint16(100+i)), at(lo4, 0)))
	}
	a.begins(snapshot(1, pubs...))
	h, _ := start(t, Options{MaxListeners: 3}, a)
	a.settled(1)
	for _, p := range pubs[:3] {
		a.wants(p.Key, port.Active)
	}
	if o := a.wants(pubs[3].Key, port.Failed); !strings.Contains(o.Reason.String(), "limit of 3") {
		t.Errorf("reason = %q", o.Reason)
	}
	a.say(removed(1, pubs[1].Key))
	a.wants(pubs[3].Key, port.Active)
	if n := h.Stats().Listeners; n != 3 {
		t.Errorf("%d listeners, want 3", n)
	}
}

func TestFlowLimit(t *testing.T) { eachWay(t, testFlowLimit) }

func testFlowLimit(t *testing.T) {
	a := newAgent(t, "vm")
	k := key(port.TCP, any4, ports.Free(t))
	ln, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	a.serve(k, ln.Addr().(*net.TCPAddr).AddrPort())
	a.begins(snapshot(1, pub(k)))
	h, _ := start(t, Options{MaxFlows: 1}, a)
	a.wants(k, port.Active)
	first := connect(t, at(lo4, k.Port))
	eventually(t, "the first flow", func() bool { return h.Guests()[0].Flows == 1 })
	if !wasReset(t, at(lo4, k.Port)) {
		t.Error("the connection over the limit is not reset")
	}
	forward.Reset(first)
	eventually(t, "room", func() bool { return h.Guests()[0].Flows == 0 })
}

func TestGapAsksForSnapshot(t *testing.T) {
	a := newAgent(t, "vm")
	k1, k2 := key(port.TCP, lo4, 1), key(port.TCP, lo4, 2)
	a.begins(snapshot(5, pub(k1, at(lo4, 0))))
	h, _ := start(t, Options{}, a)
	a.settled(5)
	a.say(put(6, pub(k2, at(lo4, 0))))
	asked := func(n int) func() bool {
		return func() bool {
			a.mu.Lock()
			defer a.mu.Unlock()
			return len(a.resyncs) == n
		}
	}
	eventually(t, "a resync", asked(1))
	// Changes that were on their way are not applied, whatever their base.
	a.say(put(5, pub(k2, at(lo4, 0))), snapshot(8, pub(k2, at(lo4, 0))), put(8, pub(k1, at(lo4, 0))))
	a.settled(9)
	if n := h.View().Len(); n != 2 {
		t.Errorf("%d publications, want 2", n)
	}
	if !asked(1)() {
		t.Errorf("resyncs = %v, want one", a.resyncs)
	}
}

func TestPartsAreAppliedAsOne(t *testing.T) {
	a := newAgent(t, "vm")
	var pubs []port.Fact
	for i := range 1500 {
		pubs = append(pubs, pub(key(port.TCP, lo4, uint16(i+1)), at(lo4, 0)))
	}
	a.begins(parts(2, 500, pubs...)...)
	h, _ := start(t, Options{MaxListeners: 100}, a)
	a.settled(2)
	if n := h.View().Len(); n != len(pubs) {
		t.Errorf("%d publications, want %d", n, len(pubs))
	}
	for _, p := range pubs {
		if len(a.heard(p.Key)) != 1 {
			t.Fatalf("no outcome of %s", p.Key)
		}
	}
	if got := h.Stats(); got.Snapshots != 1 || got.Listeners != 100 {
		t.Errorf("stats = %+v", got)
	}
}

func TestMalformedMessagesEndTheSession(t *testing.T) {
	a := newAgent(t, "vm")
	part := snapshot(1)
	part.More = true
	// A part between the parts of another, again and again.
	a.begins(slices.Repeat([]wire.Frame{part, part}, 40)...)
	h, _ := start(t, Options{}, a)
	eventually(t, "the session is ended and tried again", func() bool {
		a.mu.Lock()
		defer a.mu.Unlock()
		return a.dials > 1
	})
	if g := h.Guests()[0]; g.Connected {
		t.Errorf("guest = %+v", g)
	}
}

func TestGuestStatusSaysWhy(t *testing.T) {
	a := newAgent(t, "vm")
	a.drop(errors.New("no such socket"))
	h, _ := start(t, Options{}, a)
	eventually(t, "the error is shown", func() bool { return h.Guests()[0].Error == "no such socket" })
}

func TestSubscribe(t *testing.T) {
	a := newAgent(t, "vm")
	k := key(port.TCP, lo4, 1)
	a.begins(snapshot(1))
	h, _ := start(t, Options{}, a)
	sub := h.Subscribe()
	defer sub.Close()
	a.say(put(1, pub(k, at(lo4, 0))))
	a.settled(2)
	eventually(t, "the change is told", func() bool {
		select {
		case <-sub.C():
		default:
			return false
		}
		view, change := sub.Take()
		p, ok := view.Get(ID{"vm", k})
		return ok && p.State() == port.Active && slices.Contains(change.Keys, ID{"vm", k})
	})
}

func TestDiedListenerIsReplaced(t *testing.T) {
	a := newAgent(t, "vm")
	k := key(port.TCP, any4, ports.Free(t))
	a.greeter(k, "hello")
	a.begins(snapshot(1, pub(k)))
	network := &breaking{fail: make(chan struct{})}
	start(t, Options{Network: network}, a)
	a.wants(k, port.Active)
	close(network.fail)
	eventually(t, "the port is served by a new listener", func() bool {
		network.mu.Lock()
		defer network.mu.Unlock()
		return network.opened == 2
	})
	a.wants(k, port.Active)
	if got := greeting(t, at(lo4, k.Port)); got != "hello" {
		t.Errorf("greeting = %q", got)
	}
}

// breaking is a Network whose first listener fails on demand.
type breaking struct {
	own.Sockets
	fail   chan struct{}
	mu     sync.Mutex
	opened int
}

func (b *breaking) Listen(ctx context.Context, network, address string) (net.Listener, error) {
	ln, err := b.Sockets.Listen(ctx, network, address)
	if err != nil {
		return nil, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.opened++
	if b.opened == 1 {
		return &brokenListener{Listener: ln, fail: b.fail}, nil
	}
	return ln, nil
}

type brokenListener struct {
	net.Listener
	fail chan struct{}
}

func (b *brokenListener) Accept() (net.Conn, error) {
	<-b.fail
	return nil, errors.New("bad file descriptor")
}

func TestManyFlowsLeaveNothing(t *testing.T) { eachWay(t, testManyFlowsLeaveNothing) }

func testManyFlowsLeaveNothing(t *testing.T) {
	a := newAgent(t, "vm")
	k := key(port.TCP, any4, ports.Free(t))
	a.greeter(k, "hello")
	a.begins(snapshot(1, pub(k)))
	h, _ := start(t, Options{}, a)
	a.wants(k, port.Active)
	flow := func() {
		c, err := net.Dial("tcp4", at(lo4, k.Port).String())
		if err != nil {
			t.Fatal(err)
		}
		if b, err := io.ReadAll(c); err != nil || string(b) != "hello" {
			t.Fatalf("read %q, %v", b, err)
		}
		_ = c.Close()
	}
	idle := func() bool { return h.Stats().OpenTCP == 0 && a.server.Stats().OpenTCP == 0 }
	flow()
	eventually(t, "the first flow is gone", idle)
	baseGoroutines, baseFDs := runtime.NumGoroutine(), fds(t)
	for range 10_000 {
		flow()
	}
	eventually(t, "all flows are gone", idle)
	eventually(t, "goroutines are back", func() bool { return runtime.NumGoroutine() <= baseGoroutines })
	eventually(t, "descriptors are back", func() bool {
		runtime.GC() // what the system's pipes are kept in
		return fds(t) <= baseFDs
	})
}

func TestHalfCloseAndResetThroughHost(t *testing.T) { eachWay(t, testHalfCloseAndResetThroughHost) }

func testHalfCloseAndResetThroughHost(t *testing.T) {
	a := newAgent(t, "vm")
	k := key(port.TCP, any4, ports.Free(t))
	ln, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	a.serve(k, ln.Addr().(*net.TCPAddr).AddrPort())
	a.begins(snapshot(1, pub(k)))
	start(t, Options{}, a)
	a.wants(k, port.Active)
	flow := func() (client, server *net.TCPConn) {
		client = connect(t, at(lo4, k.Port))
		c, err := ln.Accept()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		_ = c.SetDeadline(time.Now().Add(patience))
		return client, c.(*net.TCPConn)
	}

	client, server := flow()
	_, _ = io.WriteString(client, "question")
	if err := client.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(server); err != nil || string(b) != "question" {
		t.Errorf("server read %q, %v", b, err)
	}
	_, _ = io.WriteString(server, "answer")
	if err := server.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(client); err != nil || string(b) != "answer" {
		t.Errorf("client read %q, %v", b, err)
	}

	client, server = flow()
	forward.Reset(client)
	if _, err := server.Read(make([]byte, 1)); !isReset(err) {
		t.Errorf("server read = %v, want a reset", err)
	}
	client, server = flow()
	forward.Reset(server)
	if _, err := client.Read(make([]byte, 1)); !isReset(err) {
		t.Errorf("client read = %v, want a reset", err)
	}
}

// A connection that waits is decided upon with the owner that the port has when it is to be
// served: one that came meanwhile and is denied, or not known yet, gets no connection.
func TestWaitingConnectionSeesTheOwnerOfNow(t *testing.T) {
	eachWay(t, testWaitingConnectionSeesTheOwnerOfNow)
}

func testWaitingConnectionSeesTheOwnerOfNow(t *testing.T) {
	secret := rules.Rule{Match: rules.Match{Name: "secret*"}, Deny: true}
	owner := func(name string) port.Owner {
		return port.Owner{Kind: port.OwnerContainer, ID: name, Name: name}
	}
	for _, c := range []struct {
		name    string
		owner   port.Owner
		pending bool
		state   port.State
	}{
		{"allowed", owner("web2"), false, port.Active},
		{"denied", owner("secret0"), false, port.Denied},
		{"not known yet", owner("web"), true, port.Pending},
	} {
		for _, waits := range []string{"for the answer", "for the link", "for the answer while it is withdrawn"} {
			t.Run(strings.ReplaceAll(c.name+" "+waits, " ", "-")+t.Name()[strings.LastIndex(t.Name(), "/"):], func(t *testing.T) {
				a := newAgent(t, "vm")
				k := key(port.TCP, any4, ports.Free(t))
				a.greeter(k, "hello")
				p := pub(k)
				p.Owner = owner("web")
				a.begins(snapshot(1, p))
				asked, answer := make(chan struct{}), make(chan struct{})
				a.onFlow = func(link.Stream, wire.FlowRequest) bool {
					close(asked)
					<-answer
					return false
				}
				h, _ := start(t, Options{Policy: policy(t, rules.Loopback(), secret), Grace: time.Hour, Hold: time.Hour}, a)
				a.wants(k, port.Active)
				p.Owner, p.OwnerPending = c.owner, c.pending
				var client net.Conn
				if waits == "for the link" {
					close(answer)
					a.drop(errors.New("restarting"))
					eventually(t, "the guest is lost", func() bool { return !h.Guests()[0].Connected })
					client = connect(t, at(lo4, k.Port))
					eventually(t, "the connection is held", func() bool { return h.Guests()[0].Flows == 1 })
					a.begins(snapshot(1, p))
					a.up()
				} else {
					client = connect(t, at(lo4, k.Port))
					<-asked
					last := uint64(1)
					if waits != "for the answer" {
						a.say(removed(last, k))
						last++
					}
					a.say(put(last, p))
					a.settled(last + 1)
					close(answer)
				}
				b, err := io.ReadAll(client)
				if served := string(b) == "hello"; served != (c.state == port.Active) || !served && !isReset(err) {
					t.Errorf("the client read %q, %v", b, err)
				}
				a.wants(k, c.state)
			})
		}
	}
}

// A port that waits for the limit is not opened by rules that were replaced meanwhile.
func TestWaitingPortIsOpenedByTheRulesOfNow(t *testing.T) {
	network := newMemory()
	h := idle(t, Options{Network: network, Holders: named{}, MaxListeners: 1}, "vm")
	g, first, second := h.guests[0], key(port.TCP, any4, 80), key(port.TCP, any4, 81)
	if err := g.applyWanted(t.Context(), whole(1, pub(first), pub(second))); err != nil {
		t.Fatal(err)
	}
	h.SetPolicy(policy(t, rules.Loopback(), rules.Rule{Match: rules.Match{Ports: []rules.PortRange{{First: 81, Last: 81}}}, Deny: true}))
	gone := change(2)
	gone.Removed = []port.Key{first}
	if err := g.applyWanted(t.Context(), gone); err != nil {
		t.Fatal(err)
	}
	if o := g.state.pubs[second].outcomes(); len(o) != 1 || o[0].State != port.Denied || len(network.tries) != 1 {
		t.Errorf("%+v after %d attempts to listen", o, len(network.tries))
	}
}

// A flow outlives its publication: servers close their listener before they drain.
func TestFlowOutlivesPublication(t *testing.T) { eachWay(t, testFlowOutlivesPublication) }

func testFlowOutlivesPublication(t *testing.T) {
	a := newAgent(t, "vm")
	k := key(port.TCP, any4, ports.Free(t))
	ln, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	a.serve(k, ln.Addr().(*net.TCPAddr).AddrPort())
	a.begins(snapshot(1, pub(k)))
	start(t, Options{}, a)
	a.wants(k, port.Active)
	client := connect(t, at(lo4, k.Port))
	server, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	a.say(removed(1, k))
	a.settled(2)
	if _, err := io.WriteString(server, "the rest"); err != nil {
		t.Fatal(err)
	}
	_ = server.Close()
	if b, err := io.ReadAll(client); err != nil || string(b) != "the rest" {
		t.Errorf("client read %q, %v", b, err)
	}
}

func BenchmarkSnapshot(b *testing.B) {
	const n = 4096
	g := idle(b, Options{}, "vm").guests[0]
	var pubs []port.Fact
	for i := range n {
		pubs = append(pubs, pub(key(port.TCP, lo4, uint16(i+1)), at(lo4, 0)))
	}
	for b.Loop() {
		if err := g.applyWanted(b.Context(), whole(1, pubs...)); err != nil {
			b.Fatal(err)
		}
		if err := g.applyWanted(b.Context(), whole(1)); err != nil {
			b.Fatal(err)
		}
		g.h.wg.Wait()
	}
}
