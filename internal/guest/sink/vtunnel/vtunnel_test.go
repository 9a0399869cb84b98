// SPDX-License-Identifier: Apache-2.0

package vtunnel

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/guest/sink/peer"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/testkit/leak"
	"github.com/fairlead/fairlead/internal/testkit/peertest"
	"github.com/fairlead/fairlead/internal/testkit/ports"
	"github.com/fairlead/fairlead/internal/testkit/wait"
)

func TestMain(m *testing.M) { leak.Main(m) }

func newSink(t *testing.T, url string, edit ...func(*Options)) *Sink {
	t.Helper()
	// Long, so that a slow machine does not look like a peer that hangs.
	o := Options{URL: url, Logger: slog.New(slog.DiscardHandler), Timeout: time.Minute, farewell: time.Minute, settle: 20 * time.Millisecond}
	for _, f := range edit {
		f(&o)
	}
	s, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func newReceiver(t *testing.T, network string) *peertest.Receiver {
	t.Helper()
	address := fmt.Sprintf("127.0.0.1:%d", ports.Free(t)) // it is stopped and started there
	if network == "unix" {
		address = filepath.Join(t.TempDir(), "wsl-proxy.sock")
	}
	return peertest.NewReceiver(t, network, address, net.Listen)
}

func mustNet(t *testing.T, s string) *net.IPNet {
	t.Helper()
	ip, n, err := net.ParseCIDR(s)
	if err != nil {
		t.Fatal(err)
	}
	n.IP = ip
	return n
}

// The messages of Rancher Desktop's agent, byte for byte.
func TestMessagesEqualRancherDesktops(t *testing.T) {
	tcp := func(n uint16, host string) peer.Target {
		return peer.Target{Slot: port.Slot{Protocol: port.TCP, Port: n}, Host: netip.MustParseAddr(host)}
	}
	udp := func(n uint16, host string) peer.Target {
		return peer.Target{Slot: port.Slot{Protocol: port.UDP, Port: n}, Host: netip.MustParseAddr(host)}
	}
	eth0 := connectAddrs([]*net.IPNet{mustNet(t, "172.27.96.5/20"), mustNet(t, "fe80::215:5dff:fe11:1/64")})
	for _, tt := range []struct {
		name    string
		remove  bool
		targets []peer.Target
		connect []connectAddr
		want    string
	}{
		{
			"add by vtunnel", false, []peer.Target{tcp(8080, "0.0.0.0")}, eth0,
			`{"remove":false,"ports":{"8080/tcp":[{"HostIp":"0.0.0.0","HostPort":"8080"}]},"connectAddrs":[{"network":"ip+net","addr":"172.27.96.5/20"},{"network":"ip+net","addr":"fe80::215:5dff:fe11:1/64"}]}`,
		},
		{
			"remove by vtunnel", true, []peer.Target{tcp(8080, "0.0.0.0")}, eth0[:1],
			`{"remove":true,"ports":{"8080/tcp":[{"HostIp":"0.0.0.0","HostPort":"8080"}]},"connectAddrs":[{"network":"ip+net","addr":"172.27.96.5/20"}]}`,
		},
		{
			"add by wsl-proxy", false, []peer.Target{tcp(6443, "127.0.0.1")}, nil,
			`{"remove":false,"ports":{"6443/tcp":[{"HostIp":"127.0.0.1","HostPort":"6443"}]},"connectAddrs":null}`,
		},
		{
			"remove of UDP names it", true, []peer.Target{udp(53, "127.0.0.1")}, nil,
			`{"remove":true,"ports":{"53/udp":[{"HostIp":"127.0.0.1","HostPort":"53"}]},"connectAddrs":null}`,
		},
		{
			"several ports, both families", false, []peer.Target{tcp(443, "0.0.0.0"), tcp(443, "::"), udp(53, "0.0.0.0")}, nil,
			`{"remove":false,"ports":{"443/tcp":[{"HostIp":"0.0.0.0","HostPort":"443"},{"HostIp":"::","HostPort":"443"}],"53/udp":[{"HostIp":"0.0.0.0","HostPort":"53"}]},"connectAddrs":null}`,
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if m := encode(tt.remove, tt.targets, tt.connect); string(m) != tt.want+"\n" {
				t.Errorf("message = %q\nwant      %q", m, tt.want+"\n")
			}
		})
	}
}

func TestAddAndRemove(t *testing.T) {
	r := newReceiver(t, "unix")
	rig := peertest.New(t, newSink(t, r.URL()))
	rig.Put(peertest.Pub(t, "tcp 0.0.0.0:8080", "127.0.0.1:8080"), peertest.Pub(t, "udp 0.0.0.0:5000", "127.0.0.1:5000"))
	rig.WantState("tcp 0.0.0.0:8080", port.Active)
	rig.WantReason("udp 0.0.0.0:5000", port.Failed, "no answers back")
	r.Want("5000/udp 127.0.0.1 to upstream", "8080/tcp 127.0.0.1 to upstream")
	rig.Remove("udp 0.0.0.0:5000")
	r.Want("8080/tcp 127.0.0.1 to upstream")
}

// Rancher Desktop's agent names no protocol here, so that UDP stays open on the host,
// and its context has ended, so that nothing is sent at all.
func TestAllIsRemovedAtTheEnd(t *testing.T) {
	r := newReceiver(t, "unix")
	rig := peertest.New(t, newSink(t, r.URL()+"?static=6443/tcp"))
	rig.Put(peertest.Pub(t, "tcp 0.0.0.0:8080", "127.0.0.1:8080"), peertest.Pub(t, "udp 0.0.0.0:5000", "127.0.0.1:5000"))
	r.Want("5000/udp 127.0.0.1 to upstream", "6443/tcp 127.0.0.1 to upstream", "8080/tcp 127.0.0.1 to upstream")
	rig.Stop()
	r.Want()
}

// Rancher Desktop's agent sends each change from a goroutine of its own. The peer
// handles each connection on its own, so each message must wait for the one before.
func TestAddsAndRemovesArriveInOrder(t *testing.T) {
	r := newReceiver(t, "unix")
	rig := peertest.New(t, newSink(t, r.URL()))
	const rounds = 200
	for range rounds {
		rig.Put(peertest.Pub(t, "tcp 0.0.0.0:8080", "127.0.0.1:8080"))
		rig.Remove("tcp 0.0.0.0:8080")
	}
	rig.Put(peertest.Pub(t, "tcp 0.0.0.0:8080", "127.0.0.1:8080"))
	r.Want("8080/tcp 127.0.0.1 to upstream")
	last := false // whether the last message was an add
	for i, m := range r.Messages() {
		if add := strings.HasPrefix(m, `{"remove":false`); add == last && i > 0 {
			t.Fatalf("message %d repeats the one before it: %s", i, m)
		} else {
			last = add
		}
	}
}

// Rancher Desktop's agent sends nothing to a peer that was restarted.
func TestPeerRestartIsResynced(t *testing.T) {
	for _, network := range []string{"unix", "tcp"} {
		t.Run(network, func(t *testing.T) {
			r := newReceiver(t, network)
			to := "upstream"
			url := r.URL()
			if network == "tcp" {
				to = "127.0.0.1:8080"
				url += "?interface=lo"
			}
			rig := peertest.New(t, newSink(t, url))
			rig.Put(peertest.Pub(t, "tcp 0.0.0.0:8080", "127.0.0.1:8080"))
			r.Want("8080/tcp 127.0.0.1 to " + to)
			for range 3 {
				r.Stop()
				rig.WantState("tcp 0.0.0.0:8080", port.Pending)
				r.Start()
				r.Want("8080/tcp 127.0.0.1 to " + to)
				rig.WantState("tcp 0.0.0.0:8080", port.Active)
			}
			r.Stop()
			rig.Remove("tcp 0.0.0.0:8080")
			rig.Put(peertest.Pub(t, "tcp 0.0.0.0:9090", "127.0.0.1:9090"))
			rig.WantState("tcp 0.0.0.0:9090", port.Pending)
			r.Start()
			r.Want("9090/tcp 127.0.0.1 to " + strings.Replace(to, "8080", "9090", 1))
		})
	}
}

// Rancher Desktop's agent takes a port for sent before it is, and never retries.
func TestFailedSendIsRetried(t *testing.T) {
	r := newReceiver(t, "unix")
	var dials atomic.Int32
	rig := peertest.New(t, newSink(t, r.URL(), func(o *Options) {
		o.Dial = func(ctx context.Context, network, address string) (net.Conn, error) {
			if n := dials.Add(1); n > 1 && n < 5 { // the first is the connection that is held open
				return nil, errors.New("no room")
			}
			return new(net.Dialer).DialContext(ctx, network, address)
		}
	}))
	wait.Until(t, "the peer is there", func() error {
		if dials.Load() == 0 {
			return errors.New("no connection")
		}
		return nil
	})
	rig.Put(peertest.Pub(t, "tcp 0.0.0.0:8080", "127.0.0.1:8080"))
	r.Want("8080/tcp 127.0.0.1 to upstream")
	rig.WantState("tcp 0.0.0.0:8080", port.Active)
	if n := dials.Load(); n != 5 {
		t.Errorf("%d dials, want 5", n)
	}
}

// In Rancher Desktop's agent a peer that accepts and does not read blocks everything
// for ever.
func TestHangingPeerLeavesPortsPending(t *testing.T) {
	r := newReceiver(t, "unix")
	r.Deafen(true)
	rig := peertest.New(t, newSink(t, r.URL(), func(o *Options) { o.Timeout = 50 * time.Millisecond }))
	rig.Put(peertest.Pub(t, "tcp 0.0.0.0:8080", "127.0.0.1:8080"))
	wait.Until(t, "the reason is reported", func() error {
		if o := rig.Outcomes("tcp 0.0.0.0:8080"); len(o) != 1 || o[0].State != port.Pending || !strings.Contains(o[0].Reason.String(), "did not process a message within") {
			return fmt.Errorf("%+v", o)
		}
		return nil
	})
	rig.Put(peertest.Pub(t, "tcp 0.0.0.0:9090", "127.0.0.1:9090"))
	rig.WantState("tcp 0.0.0.0:9090", port.Pending)
	r.Deafen(false)
	r.Want("8080/tcp 127.0.0.1 to upstream", "9090/tcp 127.0.0.1 to upstream")
	rig.WantState("tcp 0.0.0.0:8080", port.Active)
}

func TestAbsentPeerLeavesPortsPending(t *testing.T) {
	path := filepath.Join(t.TempDir(), "none.sock")
	rig := peertest.New(t, newSink(t, "unix://"+path))
	rig.Put(peertest.Pub(t, "tcp 0.0.0.0:8080", "127.0.0.1:8080"))
	wait.Until(t, "the reason is reported", func() error {
		if o := rig.Outcomes("tcp 0.0.0.0:8080"); len(o) != 1 || o[0].State != port.Pending || !strings.Contains(o[0].Reason.String(), "no such file") {
			return fmt.Errorf("%+v", o)
		}
		return nil
	})
}

func TestPeerThatClosesIdleConnections(t *testing.T) {
	r := newReceiver(t, "unix")
	sink := newSink(t, r.URL())
	rig := peertest.New(t, sink)
	rig.Put(peertest.Pub(t, "tcp 0.0.0.0:8080", "127.0.0.1:8080"))
	r.Want("8080/tcp 127.0.0.1 to upstream")
	r.Hangup() // what comes next it decodes again
	wait.Until(t, "it is sent again", func() error {
		if n := len(r.Messages()); n < 2 {
			return fmt.Errorf("%d messages", n)
		}
		return nil
	})
	rig.WantState("tcp 0.0.0.0:8080", port.Active)
	r.Want("8080/tcp 127.0.0.1 to upstream")
}

// wsl-proxy keeps its listeners by port: a second one for a port replaces the first,
// which is never closed.
func TestWSLProxyGetsOneListenerPerPort(t *testing.T) {
	r := newReceiver(t, "unix")
	rig := peertest.New(t, newSink(t, r.URL()))
	rig.Put(peertest.Pub(t, "tcp 0.0.0.0:8080+", "127.0.0.1:8080"), peertest.Pub(t, "tcp [::]:8080+", "[::1]:8080"))
	for _, k := range []string{"tcp 0.0.0.0:8080", "tcp [::]:8080"} {
		if o := rig.WantState(k, port.Active); o.HostAddress.String() != "127.0.0.1:8080" {
			t.Errorf("%s: host address %s", k, o.HostAddress)
		}
	}
	r.Want("8080/tcp 127.0.0.1 to upstream")
	rig.Put(peertest.Pub(t, "tcp 0.0.0.0:8080+", "0.0.0.0:8080"), peertest.Pub(t, "tcp [::]:8080+", "[::]:8080"))
	r.Want("8080/tcp 0.0.0.0 to upstream")
	rig.Put(peertest.Pub(t, "tcp 0.0.0.0:8080", "127.0.0.1:8080"), peertest.Pub(t, "tcp [::]:8080+", "[::1]:8080"))
	rig.WantReason("tcp [::]:8080", port.Conflict, "one listener for each port")
	r.Want("8080/tcp 127.0.0.1 to upstream")
	rig.Remove("tcp 0.0.0.0:8080", "tcp [::]:8080")
	r.Want()
}

// In Rancher Desktop's agent, of two publications of one port the first that leaves
// closes it.
func TestPortStaysWhileWanted(t *testing.T) {
	r := newReceiver(t, "unix")
	rig := peertest.New(t, newSink(t, r.URL()))
	rig.Put(peertest.Pub(t, "tcp 0.0.0.0:80", "127.0.0.1:80"), peertest.Pub(t, "tcp 192.168.143.1:80", "127.0.0.1:80"))
	rig.WantState("tcp 0.0.0.0:80", port.Active)
	rig.WantReason("tcp 192.168.143.1:80", port.Conflict, "held by tcp 0.0.0.0:80")
	sent := len(r.Messages())
	rig.Remove("tcp 0.0.0.0:80")
	rig.WantState("tcp 192.168.143.1:80", port.Active)
	r.Want("80/tcp 127.0.0.1 to upstream")
	if n := len(r.Messages()) - sent; n != 0 {
		t.Errorf("%d messages, though nothing changed", n)
	}
	rig.Remove("tcp 192.168.143.1:80")
	r.Want()
}

func TestPublicationsOfOneServiceAreNoConflict(t *testing.T) {
	r := newReceiver(t, "unix")
	rig := peertest.New(t, newSink(t, r.URL()+"?guest=192.168.143.1"))
	keys := []string{"tcp 0.0.0.0:30080", "tcp 192.168.143.1:30080", "tcp [::]:30080+"}
	for i, k := range keys {
		p := peertest.Pub(t, k, []string{"127.0.0.1:30080", "127.0.0.1:30080", "[::1]:30080"}[i])
		p.Owner = port.Owner{Kind: port.OwnerService, ID: "default/web", Name: "web"}
		rig.Put(p)
	}
	for _, k := range keys { // also the one that asks for [::1]: wsl-proxy has one listener for each port
		if o := rig.WantState(strings.TrimSuffix(k, "+"), port.Active); o.HostAddress.String() != "127.0.0.1:30080" {
			t.Errorf("%s is active at %s", k, o.HostAddress)
		}
	}
	r.Want("30080/tcp 127.0.0.1 to upstream")
	rig.Remove("tcp 0.0.0.0:30080", "tcp 192.168.143.1:30080", "tcp [::]:30080")
	r.Want()
}

func TestUnreachablePublicationFails(t *testing.T) {
	r := newReceiver(t, "unix")
	rig := peertest.New(t, newSink(t, r.URL()))
	for _, tt := range []struct{ key, host, reason string }{
		{"tcp 127.0.0.1:81", "127.0.0.1:81", "serves 127.0.0.1 alone"},
		{"tcp [::]:82", "[::1]:82", "serves :: alone"},
		{"tcp 0.0.0.0:83", "127.0.0.1:9083", "serves port 83, and the peer connects to 9083"},
		{"tcp 0.0.0.0:84", "127.0.0.1:0", "a rule must name one"},
	} {
		rig.Put(peertest.Pub(t, tt.key, tt.host))
		rig.WantReason(tt.key, port.Failed, tt.reason)
	}
	inner := peertest.Pub(t, "tcp 0.0.0.0:85", "127.0.0.1:85")
	inner.Origins[0].Inner = true
	rig.Put(inner)
	rig.WantReason("tcp 0.0.0.0:85", port.Failed, "only programs of the guest")
	if m := r.Messages(); len(m) > 0 {
		t.Errorf("messages: %q", m)
	}
}

func TestEntriesOfKilledAgentAreRemoved(t *testing.T) {
	r := newReceiver(t, "unix")
	memory := peer.Memory(filepath.Join(t.TempDir(), "vtunnel.json"))
	with := func(o *Options) { o.Memory = memory }
	r.Exec("", peertest.PortMapping{Ports: map[string][]peertest.PortBinding{"8080/tcp": {{HostIP: "127.0.0.1", HostPort: "8080"}}, "9090/tcp": {{HostIP: "127.0.0.1", HostPort: "9090"}}}})
	var left []peer.Entry
	for _, n := range []uint16{8080, 9090} {
		left = append(left, peer.Entry{Protocol: port.TCP, Host: netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), n)})
	}
	if err := memory.Save(left); err != nil {
		t.Fatal(err)
	}
	rig := peertest.New(t, newSink(t, r.URL(), with))
	rig.Put(peertest.Pub(t, "tcp 0.0.0.0:8080", "127.0.0.1:8080"))
	r.Want("8080/tcp 127.0.0.1 to upstream")
	rig.Stop()
	r.Want()
	if left, err := memory.Load(); err != nil || len(left) > 0 {
		t.Errorf("memory: %v, %v", left, err)
	}
}

func TestThousandsOfPortsTakeFewMessages(t *testing.T) {
	r := newReceiver(t, "unix")
	rig := peertest.New(t, newSink(t, r.URL()))
	const n = 2000
	var pubs []port.Publication
	for i := range n {
		pubs = append(pubs, peertest.Pub(t, fmt.Sprintf("tcp 0.0.0.0:%d", 10000+i), fmt.Sprintf("127.0.0.1:%d", 10000+i)))
	}
	rig.Put(pubs...)
	wait.Until(t, "all are sent", func() error {
		if got := len(r.State()); got != n {
			return fmt.Errorf("%d of %d", got, n)
		}
		return nil
	})
	if m := len(r.Messages()); m > 2*n/maxBindings {
		t.Errorf("%d messages", m)
	}
}

func TestInvalidURLs(t *testing.T) {
	for _, u := range []string{
		"http://127.0.0.1:3040", "tcp://127.0.0.1", "unix://relative", "unix:///s?static=80", "unix:///s?static=0/tcp", "unix:///s?other=1", "tcp://127.0.0.1:3040?static=53/udp",
	} {
		if _, err := New(Options{URL: u, Logger: slog.New(slog.DiscardHandler)}); err == nil || !strings.Contains(err.Error(), u) {
			t.Errorf("%s: error = %v", u, err)
		}
	}
}
