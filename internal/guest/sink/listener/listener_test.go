// SPDX-License-Identifier: Apache-2.0

package listener

import (
	"context"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead/fairlead/internal/guest/reconcile"
	"github.com/fairlead/fairlead/internal/link/own"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/table"
	"github.com/fairlead/fairlead/internal/testkit/leak"
)

func TestMain(m *testing.M) { leak.Main(m) }

// network is a Network without sockets: open holds its listeners, errs the addresses
// that cannot be opened.
type network struct {
	mu   sync.Mutex
	open map[string]*listening
	errs map[string]error
	max  int // of what was open at one time
}

type listening struct {
	n     *network
	addr  net.Addr
	key   string
	conns chan net.Conn
	done  chan struct{}
	once  sync.Once
}

func (n *network) Listen(_ context.Context, _, address string) (net.Listener, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if err := n.errs[address]; err != nil {
		return nil, &net.OpError{Op: "listen", Err: err}
	}
	if n.open[address] != nil {
		return nil, syscall.EADDRINUSE
	}
	l := &listening{
		n: n, key: address, addr: net.TCPAddrFromAddrPort(netip.MustParseAddrPort(address)),
		conns: make(chan net.Conn), done: make(chan struct{}),
	}
	n.open[address] = l
	n.max = max(n.max, len(n.open))
	return l, nil
}

func (n *network) ListenExclusive(ctx context.Context, network, address string) (net.Listener, error) {
	return n.Listen(ctx, network, address)
}

func (n *network) ListenPacket(context.Context, string, string) (*own.UDPConn, error) {
	return nil, syscall.EAFNOSUPPORT
}

func (n *network) fail(address string, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.errs[address] = err
}

func (n *network) list() []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	var out []string
	for a := range n.open {
		out = append(out, a)
	}
	slices.Sort(out)
	return out
}

// dial connects to a placeholder.
func (n *network) dial(address string) net.Conn {
	n.mu.Lock()
	l := n.open[address]
	n.mu.Unlock()
	near, far := net.Pipe()
	l.conns <- far
	return near
}

func (l *listening) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}

func (l *listening) Close() error {
	l.once.Do(func() {
		close(l.done)
		l.n.mu.Lock()
		defer l.n.mu.Unlock()
		delete(l.n.open, l.key)
	})
	return nil
}

func (l *listening) Addr() net.Addr { return l.addr }

// rig is a sink with its reconciler, in fake time.
type rig struct {
	t       *testing.T
	pubs    *table.Table[port.Key, port.Publication]
	r       *reconcile.Reconciler
	sink    *Sink
	net     *network
	watched sync.Map // of port: true while it is watched
	served  chan port.Publication
}

// run runs f with a sink in fake time.
func run(t *testing.T, o Options, f func(*rig)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		g := &rig{
			t: t, pubs: table.New[port.Key, port.Publication](port.Key.Compare),
			net: &network{open: map[string]*listening{}, errs: map[string]error{}}, served: make(chan port.Publication, 10),
		}
		o.Network, o.Logger = g.net, slog.New(slog.DiscardHandler)
		o.Watch = func(p uint16, on bool) { g.watched.Store(p, on) }
		o.Sockets = func(s port.Slot) (out []port.Publication) {
			for k, p := range g.pubs.View().All() {
				if k.Slot() == s {
					out = append(out, p)
				}
			}
			return out
		}
		if o.Serve == nil {
			o.Serve = func(ctx context.Context, c net.Conn, p port.Publication) error {
				defer c.Close()
				g.served <- p
				<-ctx.Done()
				return context.Cause(ctx)
			}
		}
		var err error
		if g.sink, err = New(o); err != nil {
			t.Fatal(err)
		}
		g.r = reconcile.New(g.pubs, []reconcile.Sink{g.sink}, reconcile.Options{Logger: o.Logger, Denied: g.sink.Reset})
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() { _ = g.sink.Run(ctx) })
		wg.Go(func() { _ = g.r.Run(ctx) })
		f(g)
		cancel()
		wg.Wait()
		if left := g.net.list(); len(left) > 0 {
			t.Errorf("open after Run: %q", left)
		}
	})
}

func (g *rig) put(ps ...port.Publication) {
	g.pubs.Update(func(tx *table.Tx[port.Key, port.Publication]) {
		for _, p := range ps {
			tx.Put(p.Key, p)
		}
	})
	synctest.Wait()
}

func (g *rig) drop(ps ...port.Publication) {
	g.pubs.Update(func(tx *table.Tx[port.Key, port.Publication]) {
		for _, p := range ps {
			tx.Delete(p.Key)
		}
	})
	synctest.Wait()
}

func (g *rig) watches(p uint16) bool {
	on, _ := g.watched.Load(p)
	return on == true
}

func (g *rig) wait(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

func (g *rig) wantOpen(when string, want ...string) {
	g.t.Helper()
	if got := g.net.list(); !slices.Equal(got, want) {
		g.t.Errorf("%s: open %q, want %q", when, got, want)
	}
}

// wantOutcome checks that the outcomes of p begin as stated: "active 127.0.0.1:80",
// then the reason.
func (g *rig) wantOutcome(when string, p port.Publication, want ...string) {
	g.t.Helper()
	outs, _ := g.r.Outcomes().View().Get(p.Key)
	var got []string
	for _, o := range outs {
		s := o.State.String() + " " + o.HostAddress.String()
		if !o.Reason.IsZero() {
			s += " " + o.Reason.String()
		}
		got = append(got, s)
	}
	ok := len(got) == len(want)
	for i := range want {
		ok = ok && strings.HasPrefix(got[i], want[i])
	}
	if !ok {
		g.t.Errorf("%s: outcomes %q, want %q", when, got, want)
	}
}

func ap(s string) netip.AddrPort { return netip.MustParseAddrPort(s) }

// nat returns a publication of a NAT rule alone.
func nat(addr string, dial ...string) port.Publication {
	a := ap(addr)
	p := port.Publication{
		Fact: port.Fact{Key: port.Key{Protocol: port.TCP, Address: a.Addr(), Port: a.Port()}, Decision: port.Decision{Allow: true, Host: []netip.AddrPort{
			netip.AddrPortFrom(port.Loopback(a.Addr()), a.Port()),
		}}},
		Origins: []port.OriginInfo{{Origin: port.Origin{Source: "nat", ID: "ip nat " + addr}, Detail: port.NewDetail("ip nat PREROUTING: …")}},
	}
	for _, d := range dial {
		p.Dial = append(p.Dial, ap(d))
	}
	return p
}

// socket adds a socket to a publication.
func socket(p port.Publication, withheld port.Reason, dial ...string) port.Publication {
	o := port.OriginInfo{
		Origin: port.Origin{Source: "socket", ID: strings.Join(dial, ",")}, Detail: port.NewDetail("pid 811 (nginx)"), Withheld: withheld,
	}
	for _, d := range dial {
		o.Dial = append(o.Dial, ap(d))
	}
	p.Origins = append(slices.Clone(p.Origins), o)
	p.Dial = append(slices.Clone(p.Dial), o.Dial...)
	return p
}

func TestPlaceholderOpensAfterSettleTime(t *testing.T) {
	run(t, Options{}, func(g *rig) {
		p := nat("0.0.0.0:8080", "172.17.0.2:80")
		g.put(p)
		g.wantOutcome("at once", p, "pending 127.0.0.1:8080")
		g.wait(749 * time.Millisecond)
		g.wantOpen("before the settle time")
		g.wait(time.Millisecond)
		g.wantOpen("after it", "127.0.0.1:8080")
		g.wantOutcome("after it", p, "active 127.0.0.1:8080")
		if !g.watches(8080) {
			t.Error("the port is not watched")
		}
		g.drop(p)
		g.wantOpen("without the publication")
		if g.watches(8080) {
			t.Error("the port is still watched")
		}
	})
}

func TestNoPlaceholderBesideAServer(t *testing.T) {
	run(t, Options{}, func(g *rig) {
		p := nat("0.0.0.0:8080", "172.17.0.2:80")
		g.put(p)
		g.wait(700 * time.Millisecond)
		both := socket(p, port.Reason{}, "127.0.0.1:8080")
		g.put(both)
		g.wait(time.Hour)
		g.wantOpen("a proxy has the port")
		g.wantOutcome("a proxy has the port", both, "active 127.0.0.1:8080")
		// The proxy ends: the settle time begins again.
		g.put(p)
		g.wait(740 * time.Millisecond)
		g.wantOpen("the proxy went a moment ago")
		g.wait(10 * time.Millisecond)
		g.wantOpen("the proxy did not come back", "127.0.0.1:8080")
	})
}

// Docker starts the proxy after the rule; how long after depends on the machine.
func TestDockerRuleWaitsForItsProxy(t *testing.T) {
	run(t, Options{}, func(g *rig) {
		p := nat("0.0.0.0:8080", "172.17.0.2:80")
		p.Origins[0].Maker = port.MakerDocker
		g.put(p)
		g.wait(9 * time.Second)
		g.wantOpen("a slow engine")
		said := p
		said.Origins = append(slices.Clone(p.Origins), port.OriginInfo{Origin: port.Origin{Source: "docker", ID: "x"}})
		g.put(said)
		g.wantOpen("the container runs without a proxy", "127.0.0.1:8080")
		g.drop(p)
		g.put(p)
		g.wait(10 * time.Second)
		g.wantOpen("nobody says what Docker does", "127.0.0.1:8080")
		g.drop(p)
		// The proxy ends while Docker is restarted; the container goes on.
		g.put(socket(said, port.Reason{}, "127.0.0.1:8080"))
		g.put(said)
		g.wait(59 * time.Second)
		g.wantOpen("the proxy is away")
		g.wait(time.Second)
		g.wantOpen("the proxy does not come back", "127.0.0.1:8080")
	})
}

func TestPublicationShapes(t *testing.T) {
	expose := func(p port.Publication, host ...string) port.Publication {
		p.Decision.Host = nil
		for _, h := range host {
			p.Decision.Host = append(p.Decision.Host, ap(h))
		}
		return p
	}
	bare := func(addr string) port.Publication { p := nat(addr); p.Origins = nil; return p }
	mapped := socket(bare("0.0.0.0:80"), port.Reason{}, "127.0.0.1:80")
	mapped.Origins[0].Mapped = true
	reserved := func(dial ...string) port.Publication {
		p := socket(nat("0.0.0.0:80"), port.Because(port.Reserved), "127.0.0.1:80")
		p.Dial = nil
		for _, d := range dial {
			p.Dial = append(p.Dial, ap(d))
		}
		return p
	}
	half := func(p port.Publication) port.Publication { p.Origins[1].Mapped = true; return p }
	udp := nat("0.0.0.0:80", "10.0.0.1:80")
	udp.Protocol = port.UDP
	for _, c := range []struct {
		name string
		p    port.Publication
		open []string
		want []string
	}{
		{"IPv4 rule", nat("0.0.0.0:80", "10.0.0.1:80"), []string{"127.0.0.1:80"}, []string{"active 127.0.0.1:80"}},
		{"IPv6 rule", nat("[::]:80", "[fd00::1]:80"), []string{"[::1]:80"}, []string{"active [::1]:80"}},
		{"rule of loopback", nat("127.0.0.1:80", "10.0.0.1:80"), []string{"127.0.0.1:80"}, []string{"active 127.0.0.1:80"}},
		{"rule of one address", nat("192.0.2.2:80", "10.0.0.1:80"), []string{"127.0.0.1:80"}, []string{"active 127.0.0.1:80"}},
		{"all addresses", expose(nat("[::]:80", "10.0.0.1:80"), "[::]:80"), []string{"[::]:80"}, []string{"active [::]:80"}},
		{"another port", expose(nat("0.0.0.0:80", "10.0.0.1:80"), "127.0.0.1:8080"), []string{"127.0.0.1:8080"}, []string{"active 127.0.0.1:8080"}},
		{"another address", expose(nat("0.0.0.0:80", "10.0.0.1:80"), "192.168.1.5:80"), nil, []string{"failed 192.168.1.5:80 only 127.0.0.1"}},
		{"UDP", udp, nil, []string{"denied 127.0.0.1:80 UDP is not enabled"}},
		{"nothing serves it", nat("0.0.0.0:80"), nil, []string{"pending 127.0.0.1:80 nothing is known to serve it"}},
		{"server on all addresses", socket(bare("0.0.0.0:80"), port.Reason{}, "127.0.0.1:80"), nil, []string{"active 127.0.0.1:80"}},
		{"server on loopback", socket(bare("127.0.0.1:80"), port.Reason{}, "127.0.0.1:80"), nil, []string{"active 127.0.0.1:80"}},
		{"server on ::1", socket(bare("[::1]:80"), port.Reason{}, "[::1]:80"), nil, []string{"active [::1]:80"}},
		{"server on ::", socket(bare("[::]:80"), port.Reason{}, "[::1]:80"), nil, []string{"active [::1]:80"}},
		{"its IPv4 half, which a relay shows at ::1 only", mapped, nil, []string{"conflict 127.0.0.1:80 its own socket at [::]:80"}},
		{"an IPv4 half, and a server of IPv4", socket(mapped, port.Reason{}, "127.0.0.1:80"), nil, []string{"active 127.0.0.1:80"}},
		{"server on one address, which a relay does not see", socket(bare("192.0.2.2:80"), port.Reason{}, "192.0.2.2:80"),
			[]string{"127.0.0.1:80"}, []string{"active 127.0.0.1:80"}},
		{"server on another loopback address", expose(socket(bare("127.0.0.53:80"), port.Reason{}, "127.0.0.53:80"), "127.0.0.1:80"),
			[]string{"127.0.0.1:80"}, []string{"active 127.0.0.1:80"}},
		{"bound, not listening", socket(nat("0.0.0.0:80", "10.0.0.1:80"), port.Because(port.Unlistened)), nil,
			[]string{`conflict 127.0.0.1:80 127.0.0.1:80 is held by "pid 811 (nginx)" (bound, not listening), while a NAT rule serves the port`}},
		{"reserved, and the rule is for the loopback too", reserved("127.0.0.1:80", "10.0.0.1:80"), nil, []string{"active 127.0.0.1:80"}},
		{"reserved, and the rule is not for the loopback", reserved("10.0.0.1:80"), nil,
			[]string{`conflict 127.0.0.1:80 127.0.0.1:80 is held by "pid 811 (nginx)" (only reserves the port`}},
		{"reserved in both families by one socket", half(reserved("127.0.0.1:80")), nil, []string{"conflict 127.0.0.1:80 its own socket at [::]:80"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			run(t, Options{}, func(g *rig) {
				g.put(c.p)
				g.wait(time.Second)
				g.wantOpen("after a second", c.open...)
				g.wantOutcome("after a second", c.p, c.want...)
				g.drop(c.p)
				g.wantOpen("at the end")
			})
		})
	}
}

// A server of another port that is moved to one in use is told who has it: no NAT rule serves it.
func TestConflictOfAMovedServer(t *testing.T) {
	run(t, Options{}, func(g *rig) {
		held := socket(nat("0.0.0.0:80"), port.Because(port.Unlistened))
		held.Origins, held.Decision = held.Origins[1:], port.Decision{}
		g.put(held)
		moved := socket(nat("0.0.0.0:8080"), port.Reason{}, "127.0.0.1:8080")
		moved.Origins, moved.Decision.Host = moved.Origins[1:], []netip.AddrPort{ap("127.0.0.1:80")}
		g.put(moved)
		g.wait(time.Second)
		outs, _ := g.r.Outcomes().View().Get(moved.Key)
		if len(outs) != 1 || outs[0].State != port.Conflict || outs[0].Reason.Code() == port.HeldForItself {
			t.Errorf("outcomes %v, want a conflict with another program", outs)
		}
	})
}

// Denied and withheld sockets are in the table too: their owner is named, and the port
// is left alone until it is free.
func TestConflictNamesPortOwner(t *testing.T) {
	run(t, Options{}, func(g *rig) {
		held := socket(nat("0.0.0.0:80"), port.Because(port.Unlistened))
		held.Origins = held.Origins[1:]
		held.Decision = port.Decision{Reason: port.Because(port.Unlistened)}
		p := nat("127.0.0.1:80", "10.0.0.1:80")
		g.put(held, p)
		g.wait(time.Minute)
		g.wantOpen("somebody has the port")
		g.wantOutcome("somebody has the port", p, `conflict 127.0.0.1:80 127.0.0.1:80 is held by "pid 811 (nginx)" (bound, not listening)`)
		g.drop(held)
		g.wait(time.Minute)
		g.wantOpen("it is free", "127.0.0.1:80")
	})
}

func TestPortInUseIsRetried(t *testing.T) {
	run(t, Options{}, func(g *rig) {
		p := nat("0.0.0.0:80", "10.0.0.1:80")
		g.net.fail("127.0.0.1:80", syscall.EADDRINUSE)
		g.put(p)
		g.wait(time.Second)
		for range 600 {
			g.wantOutcome("in use", p, "conflict 127.0.0.1:80 127.0.0.1:80 is in use")
			g.wait(100 * time.Millisecond)
		}
		if g.watches(80) {
			t.Error("a port that is not ours is watched")
		}
		g.net.fail("127.0.0.1:80", syscall.EACCES)
		g.wait(time.Minute)
		g.wantOutcome("no privilege", p, "failed 127.0.0.1:80 listen on 127.0.0.1:80: permission denied: grant CAP_NET_BIND_SERVICE, or run `fairlead forward add 80/tcp --to 8080` (before that, if it is a forward already, `fairlead forward rm 80/tcp`)")
		g.net.fail("127.0.0.1:80", nil)
		g.wait(time.Minute)
		g.wantOutcome("free", p, "active 127.0.0.1:80")
	})
}

// What is asked for by name is moved by its name: a rule about its number comes after.
func TestPortByNameIsMovedByName(t *testing.T) {
	run(t, Options{}, func(g *rig) {
		p := nat("0.0.0.0:80", "10.0.0.1:80")
		p.SetNamed("", []string{"web:80/tcp"})
		g.net.fail("127.0.0.1:80", syscall.EACCES)
		g.put(p)
		g.wait(time.Minute)
		g.wantOutcome("no privilege", p, "failed 127.0.0.1:80 listen on 127.0.0.1:80: permission denied: grant CAP_NET_BIND_SERVICE, or run `fairlead forward add web:80/tcp --to 8080`")
	})
}

func TestPlaceholderYieldsToServer(t *testing.T) {
	run(t, Options{}, func(g *rig) {
		p, q := nat("0.0.0.0:80", "10.0.0.1:80"), nat("[::]:80", "[fd00::1]:80")
		other := nat("0.0.0.0:81", "10.0.0.1:81")
		g.put(p, q, other)
		g.wait(time.Second)
		g.wantOpen("all", "127.0.0.1:80", "127.0.0.1:81", "[::1]:80")
		for _, c := range []struct {
			protocol port.Protocol
			at       string
		}{{port.UDP, "0.0.0.0:80"}, {port.TCP, "127.0.0.2:80"}, {port.TCP, "[fd00::1]:80"}, {port.TCP, "0.0.0.0:82"}} {
			g.sink.Contend(c.protocol, ap(c.at), false, "x")
		}
		g.sink.Contend(port.TCP, ap("[::ffff:192.0.2.2]:80"), false, "x")
		g.wantOpen("what is asked for stands beside them", "127.0.0.1:80", "127.0.0.1:81", "[::1]:80")

		g.sink.Contend(port.TCP, ap("0.0.0.0:80"), false, `"nginx"`)
		synctest.Wait()
		g.wantOpen("released, with that of the other family", "127.0.0.1:81")
		g.wantOutcome("released", p, `pending 127.0.0.1:80 released for "nginx"`)
		g.wait(29 * time.Second)
		g.wantOpen("a while later", "127.0.0.1:81")
		g.wait(2 * time.Second)
		g.wantOpen("nobody took it", "127.0.0.1:80", "127.0.0.1:81", "[::1]:80")
		// The second time it waits longer.
		g.sink.Contend(port.TCP, ap("[::]:80"), false, `"nginx"`)
		g.wait(59 * time.Second)
		g.wantOpen("released again", "127.0.0.1:81")
		// The server starts, and serves the publication.
		both := socket(p, port.Reason{}, "127.0.0.1:80")
		g.put(both)
		g.wait(time.Hour)
		g.wantOutcome("the server has it", both, "active 127.0.0.1:80")
		if g.sink.Stats().Yields != 2 {
			t.Errorf("yields = %d, want 2", g.sink.Stats().Yields)
		}
	})
}

// The host address goes to the most exact guest address; the loser's reason names the
// winner.
func TestTwoPublicationsForOneAddress(t *testing.T) {
	run(t, Options{}, func(g *rig) {
		any, exact := nat("0.0.0.0:80", "10.0.0.1:80"), nat("127.0.0.1:80", "10.0.0.2:80")
		g.put(any)
		g.wait(time.Second)
		g.put(exact)
		g.wantOutcome("the exact one", exact, "active 127.0.0.1:80")
		g.wantOutcome("the other", any, "conflict 127.0.0.1:80 127.0.0.1:80 is held by tcp 127.0.0.1:80")
		c := g.net.dial("127.0.0.1:80")
		defer c.Close()
		if p := <-g.served; p.Key != exact.Key {
			t.Errorf("served by %v", p.Key)
		}
		g.drop(exact)
		g.wantOutcome("alone", any, "active 127.0.0.1:80")
	})
}

// What somebody asked for at a host port precedes what has it for its number, unless a server
// of the guest has it: nobody can take it from that.
func TestWhatWasAskedForPrecedesPlainPorts(t *testing.T) {
	run(t, Options{}, func(g *rig) {
		plain, forwarded := nat("0.0.0.0:80", "10.0.0.1:80"), nat("0.0.0.0:8080", "10.0.0.2:80")
		forwarded.Decision.Host = []netip.AddrPort{ap("127.0.0.1:80")}
		g.put(plain)
		g.wait(time.Second)
		g.put(forwarded)
		g.wantOutcome("what was asked for", forwarded, "active 127.0.0.1:80")
		g.wantOutcome("the plain one", plain, "conflict 127.0.0.1:80 127.0.0.1:80 is held by tcp 0.0.0.0:8080")
		g.drop(forwarded)
		g.wantOutcome("alone", plain, "active 127.0.0.1:80")
	})
	run(t, Options{}, func(g *rig) {
		server, forwarded := socket(nat("0.0.0.0:80"), port.Reason{}, "127.0.0.1:80"), nat("0.0.0.0:8080", "10.0.0.2:80")
		forwarded.Decision.Host = []netip.AddrPort{ap("127.0.0.1:80")}
		g.put(server, forwarded)
		g.wait(time.Second)
		g.wantOutcome("a server", server, "active 127.0.0.1:80")
		g.wantOutcome("what was asked for", forwarded, "conflict 127.0.0.1:80 127.0.0.1:80 is held by tcp 0.0.0.0:80")
	})
}

// owned gives publications an owner.
func owned(o port.Owner, ps ...port.Publication) []port.Publication {
	for i := range ps {
		ps[i].Owner = o
	}
	return ps
}

var web = port.Owner{Kind: port.OwnerService, ID: "default/web", Name: "web"}

func TestPublicationsOfOneServiceAreNoConflict(t *testing.T) {
	run(t, Options{}, func(g *rig) {
		ps := owned(web, nat("0.0.0.0:80", "10.0.0.1:80"), nat("127.0.0.1:80", "10.0.0.1:80"), nat("192.0.2.2:80", "10.0.0.1:80"))
		for i := range ps {
			ps[i].Decision.Host = []netip.AddrPort{ap("127.0.0.1:80")}
		}
		other := nat("192.0.2.3:80", "10.0.0.9:80")
		g.put(append(ps, other)...)
		g.wait(time.Second)
		for _, p := range ps {
			g.wantOutcome("together", p, "active 127.0.0.1:80")
		}
		g.wantOutcome("another's", other, `conflict 127.0.0.1:80 127.0.0.1:80 is held by tcp 127.0.0.1:80 ("web")`)
		g.wantOpen("together", "127.0.0.1:80")
		g.net.fail("127.0.0.1:80", syscall.EACCES)
		g.drop(ps[1])
		g.wantOutcome("without the first", ps[0], "active 127.0.0.1:80")
		g.wantOutcome("without the first", ps[2], "active 127.0.0.1:80")
	})
}

func TestFlowOutlivesItsPublicationUnlessDenied(t *testing.T) {
	run(t, Options{}, func(g *rig) {
		p := nat("0.0.0.0:80", "10.0.0.1:80")
		g.put(p)
		g.wait(time.Second)
		c := g.net.dial("127.0.0.1:80")
		defer c.Close()
		<-g.served
		g.drop(p)
		g.wait(time.Minute)
		if n := g.sink.Stats().Flows; n != 1 {
			t.Errorf("%d flows after the publication went, want 1", n)
		}
		g.put(p)
		denied := p
		denied.Decision = port.Decision{Reason: port.Because(port.DeniedByRule)}
		g.put(denied)
		g.wait(time.Second)
		if n := g.sink.Stats().Flows; n != 0 {
			t.Errorf("%d flows of a denied port", n)
		}
	})
}

func TestFlowLimit(t *testing.T) {
	run(t, Options{MaxFlows: 2}, func(g *rig) {
		g.put(nat("0.0.0.0:80", "10.0.0.1:80"))
		g.wait(time.Second)
		for range 3 {
			defer g.net.dial("127.0.0.1:80").Close()
		}
		g.wait(time.Second)
		if st := g.sink.Stats(); st.Flows != 2 || st.OverLimit != 1 {
			t.Errorf("stats = %+v", st)
		}
	})
}

func TestMissingOptions(t *testing.T) {
	if _, err := New(Options{}); err == nil {
		t.Error("no options, no error")
	}
}

func TestLeftoverConnections(t *testing.T) {
	const table = `  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4711 1 0 100 0 0 10 0
   1: 0100007F:1F91 0100007F:8888 06 00000000:00000000 03:00000F4C 00000000     0        0 0 3 0
   2: 0100007F:8888 0100007F:1F92 01 00000000:00000000 00:00000000 00000000     0        0 4712 1 0 20 4 30 10 -1
`
	path := filepath.Join(t.TempDir(), "tcp")
	if err := os.WriteFile(path, []byte(table), 0o600); err != nil {
		t.Fatal(err)
	}
	for p, want := range map[uint16]bool{8080: false, 8081: true, 8082: false, 0x8888: true} {
		if got := connectionsAt(path, p); got != want {
			t.Errorf("port %d: %v, want %v", p, got, want)
		}
	}
}

// A wildcard that cannot be opened leaves the narrower address of its server open.
func TestTakenWildcardLeavesLoopback(t *testing.T) {
	run(t, Options{}, func(g *rig) {
		ps := owned(web, nat("127.0.0.1:80", "10.0.0.1:80"), nat("0.0.0.0:80", "10.0.0.1:80"))
		ps[1].Decision.Host = []netip.AddrPort{ap("0.0.0.0:80")}
		g.net.fail("0.0.0.0:80", syscall.EADDRINUSE)
		g.put(ps[0])
		g.wait(time.Second)
		g.wantOpen("alone", "127.0.0.1:80")
		g.put(ps[1])
		g.wait(time.Second)
		for range 20 {
			g.wantOpen("beside the wildcard", "127.0.0.1:80")
			g.wantOutcome("beside the wildcard", ps[0], "active 127.0.0.1:80")
			g.wantOutcome("beside the wildcard", ps[1], "conflict 0.0.0.0:80")
			g.wait(10 * time.Second)
		}
		g.net.fail("0.0.0.0:80", nil)
		g.wait(besideMax)
		g.wantOpen("when it is free", "0.0.0.0:80")
		g.wantOutcome("when it is free", ps[0], "active 127.0.0.1:80")
		g.wantOutcome("when it is free", ps[1], "active 0.0.0.0:80")
	})
}

// A server that binds a wildcard that could not be opened is reported at once, not when
// the wildcard would be tried again.
func TestServerBindsTakenWildcard(t *testing.T) {
	run(t, Options{}, func(g *rig) {
		ps := owned(web, nat("127.0.0.1:80", "10.0.0.1:80"), nat("0.0.0.0:80", "10.0.0.1:80"))
		ps[1].Decision.Host = []netip.AddrPort{ap("0.0.0.0:80")}
		g.net.fail("0.0.0.0:80", syscall.EADDRINUSE)
		g.put(ps...)
		g.wait(5 * time.Second)
		g.wantOpen("taken", "127.0.0.1:80")
		g.wantOutcome("taken", ps[1], "conflict 0.0.0.0:80")
		ps = owned(web, nat("127.0.0.1:80", "10.0.0.1:80"), socket(nat("0.0.0.0:80", "10.0.0.1:80"), port.Reason{}, "0.0.0.0:80"))
		ps[1].Decision.Host = []netip.AddrPort{ap("0.0.0.0:80")}
		g.put(ps[1])
		g.wait(time.Second)
		g.wantOpen("served")
		g.wantOutcome("served", ps[0], "active 127.0.0.1:80")
		g.wantOutcome("served", ps[1], "active 0.0.0.0:80")
	})
}

// Only an address that is not available is given up for narrower ones.
func TestFailedWildcardIsRetried(t *testing.T) {
	for _, err := range []error{own.ErrDescriptors, syscall.ENOBUFS} {
		t.Run(err.Error(), func(t *testing.T) {
			run(t, Options{}, func(g *rig) {
				ps := owned(web, nat("127.0.0.1:80", "10.0.0.1:80"), nat("0.0.0.0:80", "10.0.0.1:80"))
				ps[1].Decision.Host = []netip.AddrPort{ap("0.0.0.0:80")}
				g.net.fail("0.0.0.0:80", err)
				g.put(ps...)
				g.wait(5 * time.Second)
				g.wantOpen("failing")
				g.net.fail("0.0.0.0:80", nil)
				g.wait(failureMax)
				g.wantOpen("well again", "0.0.0.0:80")
			})
		})
	}
}

// The socket of a publication serves its narrow address where it keeps the wildcard of
// its owner from being opened.
func TestOwnSocketIsNoConflict(t *testing.T) {
	run(t, Options{}, func(g *rig) {
		ps := owned(web, socket(nat("127.0.0.1:80"), port.Reason{}, "127.0.0.1:80"), nat("0.0.0.0:80", "10.0.0.1:80"), nat("192.0.2.2:80", "10.0.0.1:80"))
		ps[1].Decision.Host = []netip.AddrPort{ap("0.0.0.0:80")}
		ps[2].Decision.Host = []netip.AddrPort{ap("127.0.0.1:80")}
		g.put(ps...)
		g.wait(time.Second)
		g.wantOpen("with a socket")
		g.wantOutcome("with a socket", ps[0], "active 127.0.0.1:80")
		g.wantOutcome("with a socket", ps[1], `conflict 0.0.0.0:80 0.0.0.0:80 is held by "pid 811 (nginx)"`)
		g.wantOutcome("with a socket", ps[2], "active 127.0.0.1:80")
		g.put(owned(web, nat("127.0.0.1:80", "10.0.0.1:80"))...) // its socket has gone
		g.wait(conflictMax)
		g.wantOpen("without a socket", "0.0.0.0:80")
	})
}

// A publication that is refused its port now and then is not away for longer each time.
func TestReleaseTimesStartAnew(t *testing.T) {
	run(t, Options{}, func(g *rig) {
		p := nat("0.0.0.0:80", "10.0.0.1:80")
		g.put(p)
		g.wait(time.Second)
		for range 5 { // a server that is refused again and again
			g.sink.Contend(port.TCP, ap("127.0.0.1:80"), false, "nginx")
			g.wait(yieldMax)
		}
		g.wantOpen("after releases", "127.0.0.1:80")
		g.wait(2 * yieldMax)
		g.sink.Contend(port.TCP, ap("127.0.0.1:80"), false, "nginx")
		g.wait(yieldFirst)
		g.wantOpen("after a release long after those", "127.0.0.1:80")
	})
}
