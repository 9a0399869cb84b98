// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead/fairlead/internal/config/rules"
	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/link/wire"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/testkit/ports"
)

// restart has a new process of the agent begin a session with these messages.
func (a *agent) restart(cs ...wire.Frame) {
	a.drop(errors.New("restarting"))
	a.renew()
	a.begins(cs...)
	a.up()
}

// renew has the next session be of a new process.
func (a *agent) renew() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.life++
}

// keptRig is a host in fake time whose guest published the ports 80 and 81, and whose agent
// was restarted and has reported only port 80 again.
func keptRig(t *testing.T, test func(a *agent, h *Host, network *memory)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		a := newAgent(t, "vm")
		a.hello = "box"
		a.begins(snapshot(7, pub(p80), pub(p81)))
		network := newMemory()
		h, stop := start(t, Options{Network: network}, a)
		time.Sleep(time.Second)
		a.restart(incomplete(1, pub(p80)))
		time.Sleep(time.Second)
		wantOpen(t, network, 80, 81)
		if n := len(network.tries); n != 2 {
			t.Errorf("%d listeners were opened", n)
		}
		test(a, h, network)
		stop()
	})
}

var p80, p81 = key(port.TCP, any4, 80), key(port.TCP, any4, 81)

func wantOpen(t *testing.T, network *memory, want ...uint16) {
	t.Helper()
	synctest.Wait()
	open := make(map[uint16]bool)
	for _, n := range want {
		open[n] = true
	}
	for _, n := range []uint16{80, 81} {
		if network.isOpen(at(lo4, n)) != open[n] {
			t.Errorf("port %d: open is %v, want %v", n, !open[n], open[n])
		}
	}
}

// What is kept takes no room of what the guest publishes.
func TestKeptPortsDoNotCountAgainstTheLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAgent(t, "vm")
		a.begins(snapshot(7, pub(p80), pub(p81)))
		network := newMemory()
		_, stop := start(t, Options{Network: network, MaxListeners: 2}, a)
		time.Sleep(time.Second)
		a.restart(incomplete(1, pub(p80)))
		time.Sleep(time.Second)
		wantOpen(t, network, 80, 81)
		k := key(port.TCP, any4, 90)
		a.say(put(1, pub(k)))
		synctest.Wait()
		a.wants(k, port.Active)
		wantOpen(t, network, 80)
		stop()
	})
}

// A connection to a kept port waits, and is then requested of the guest, which refuses it
// unless it publishes the port by then. It ends when the port is withdrawn.
func TestConnectionToKeptPortWaits(t *testing.T) {
	keptRig(t, func(a *agent, h *Host, network *memory) {
		var asked []port.Key
		a.onFlow = func(s link.Stream, q wire.FlowRequest) bool {
			asked = append(asked, q.Key)
			_ = wire.WriteReply(s, wire.FlowReply{Status: wire.FlowForbidden, Reason: "no such publication"})
			_ = s.Close()
			return true
		}
		began := time.Now()
		c := network.dial(t, at(lo4, 81))
		if _, err := c.Read(make([]byte, 1)); err == nil {
			t.Error("read gave no error")
		}
		if got := time.Since(began); got != 3*time.Second || len(asked) != 1 || asked[0] != p81 {
			t.Errorf("waited %v, asked for %v", got, asked)
		}

		// It is withdrawn: at once, and the guest is not asked.
		began = time.Now()
		c = network.dial(t, at(lo4, 81))
		time.Sleep(time.Second)
		a.say(snapshot(2, pub(p80)))
		if _, err := c.Read(make([]byte, 1)); err == nil {
			t.Error("read gave no error")
		}
		if got := time.Since(began); got != time.Second || len(asked) != 1 {
			t.Errorf("waited %v, asked for %v", got, asked)
		}
		if n := h.Stats().Refused; n != 2 {
			t.Errorf("%d refused", n)
		}
	})
}

// A connection that waited is told what the rules say of the port by then.
func TestConnectionToKeptPortIsToldWhatTheRulesSay(t *testing.T) {
	named := pub(p81)
	named.Owner = port.Owner{Kind: port.OwnerContainer, Name: "db"}
	waiting := pub(p81)
	waiting.OwnerPending = true
	for name, c := range map[string]struct {
		put  port.Fact
		want string
	}{
		"denied":  {named, "denied by the host's rules"},
		"pending": {waiting, "not decided by the host's rules yet: owner not known yet"},
	} {
		t.Run(name, func(t *testing.T) {
			keptRig(t, func(a *agent, h *Host, _ *memory) {
				h.SetPolicy(policy(t, rules.Loopback(), rules.Rule{Match: rules.Match{Name: "db"}, Deny: true}))
				synctest.Wait()
				to := firstTarget(h, p81)
				ended := make(chan error, 1)
				go func() {
					_, err := h.stream(context.Background(), to, netip.AddrPort{}, netip.AddrPort{})
					ended <- err
				}()
				time.Sleep(time.Second)
				a.say(put(1, c.put))
				if err := <-ended; err == nil || err.Error() != c.want {
					t.Errorf("got %v, want %s", err, c.want)
				}
			})
		})
	}
}

// firstTarget returns the target of the first claim of a publication.
func firstTarget(h *Host, k port.Key) *target {
	l := h.guests[0].lock()
	defer l.unlock()
	return &l.pubs[k].claims[0].target
}

// webByName is a publication that the guest was asked for as web:80.
func webByName() port.Fact {
	p := pub(key(port.TCP, netip.MustParseAddr("172.17.0.2"), 80))
	p.Source, p.Named = port.SourceDemand, &port.Named{Demands: []string{"web:80/tcp"}}
	return p
}

// A client that waits at a port that is kept is not led to another container that has
// its address by now, also if both names are to be at one host port.
func TestConnectionToKeptNameIsOfThatName(t *testing.T) {
	for _, other := range []string{"18081", "18080"} {
		testConnectionToKeptNameIsOfThatName(t, other)
	}
}

func testConnectionToKeptNameIsOfThatName(t *testing.T, other string) {
	synctest.Test(t, func(t *testing.T) {
		web, db := webByName(), webByName()
		db.Named = &port.Named{Demands: []string{"db:80/tcp"}}
		a := newAgent(t, "vm")
		a.hello = "box"
		a.begins(snapshot(7, web))
		to := func(demand, hostPort string) rules.Rule {
			d, err := port.ParseDemand(demand)
			if err != nil {
				t.Fatal(err)
			}
			n, err := rules.ParseHostPort(hostPort)
			if err != nil {
				t.Fatal(err)
			}
			return rules.Rule{
				Match:    rules.Match{Protocol: d.Protocol, Ports: []rules.PortRange{{First: d.Port, Last: d.Port}}, Demand: d},
				HostPort: n,
			}
		}
		both, err := rules.Empty(rules.Loopback()).WithRuntime([]rules.Rule{to("web:80", "18080"), to("db:80", other)})
		if err != nil {
			t.Fatal(err)
		}
		h, stop := startGuests(t, Options{Network: newMemory(), Policy: both, Guests: []Guest{a.guest()}})
		defer stop()
		a.wants(web.Key, port.Active)
		a.restart(incomplete(1))
		synctest.Wait()
		web80 := firstTarget(h, web.Key)
		ended := make(chan error, 1)
		go func() {
			_, err := h.stream(context.Background(), web80, netip.AddrPort{}, netip.AddrPort{})
			ended <- err
		}()
		time.Sleep(time.Second)
		a.say(put(1, db))
		if err := <-ended; !errors.Is(err, errWithdrawn) {
			t.Errorf("db at %s: got %v, want %v", other, err, errWithdrawn)
		}
	})
}

// A client that connects again and again while the agent is restarted beside a slow engine
// is always served.
func TestClientIsServedWhileAgentRestartsBesideSlowEngine(t *testing.T) {
	eachWay(t, testClientIsServedWhileAgentRestartsBesideSlowEngine)
}

func testClientIsServedWhileAgentRestartsBesideSlowEngine(t *testing.T) {
	a := newAgent(t, "vm")
	k := key(port.TCP, any4, ports.Free(t))
	a.greeter(k, "hello")
	var known atomic.Bool
	known.Store(true)
	a.onFlow = func(s link.Stream, _ wire.FlowRequest) bool {
		if known.Load() {
			return false
		}
		_ = wire.WriteReply(s, wire.FlowReply{Status: wire.FlowForbidden, Reason: "no such publication"})
		_ = s.Close()
		return true
	}
	a.begins(snapshot(1, pub(k)))
	h, stop := start(t, Options{Hold: time.Hour, Grace: time.Hour}, a)
	a.wants(k, port.Active)

	var connecting sync.Mutex // held by a client that is served: the loss of the link resets it
	served := 0
	end := make(chan struct{})
	var clients sync.WaitGroup
	clients.Go(func() {
		for ended := false; !ended; {
			connecting.Lock()
			if got, err := receive(at(lo4, k.Port)); got != "hello" {
				t.Errorf("client %d got %q, %v", served, got, err)
			}
			served++
			connecting.Unlock()
			select {
			case <-end:
				ended = true
			default:
			}
		}
	})
	for range 5 {
		connecting.Lock()
		before := served
		known.Store(false)
		a.drop(errors.New("restarting"))
		eventually(t, "the guest is lost", func() bool { return !h.Guests()[0].Connected })
		connecting.Unlock()
		a.renew()
		a.begins(incomplete(10))
		a.up()
		a.settled(10)
		eventually(t, "a client waits", func() bool { return h.Guests()[0].Flows == 1 })
		time.Sleep(20 * time.Millisecond) // the engine answers late
		known.Store(true)
		a.say(put(10, pub(k)), snapshot(11, pub(k)))
		a.settled(11)
		eventually(t, "it is served", func() bool {
			connecting.Lock()
			defer connecting.Unlock()
			return served > before
		})
	}
	close(end)
	clients.Wait()
	stop()
}

// receive returns what a connection to a host address receives.
func receive(from netip.AddrPort) (string, error) {
	c, err := net.DialTimeout("tcp", from.String(), patience)
	if err != nil {
		return "", err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(patience))
	b, err := io.ReadAll(c)
	return string(b), err
}
