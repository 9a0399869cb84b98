// SPDX-License-Identifier: Apache-2.0

package gvproxy

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/fairlead/fairlead/internal/guest/sink/peer"
	"github.com/fairlead/fairlead/internal/link/own"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/testkit/leak"
	"github.com/fairlead/fairlead/internal/testkit/peertest"
	"github.com/fairlead/fairlead/internal/testkit/probe"
	"github.com/fairlead/fairlead/internal/testkit/wait"
)

func TestMain(m *testing.M) { leak.Main(m) }

func start(t *testing.T, f *forwarder, edit ...func(*Options)) *peertest.Rig {
	t.Helper()
	// Long, so that a slow machine does not look like a peer that hangs.
	o := Options{
		URLs: []string{f.url()}, Logger: slog.New(slog.DiscardHandler), Timeout: time.Minute, farewell: 2 * time.Minute,
	}
	for _, g := range edit {
		g(&o)
	}
	s, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	return peertest.New(t, s)
}

func quick(o *Options) { o.Timeout = 400 * time.Millisecond }

func TestExposeAndUnexpose(t *testing.T) {
	f := newForwarder(t)
	f.add("tcp", "127.0.0.1:2222", "192.168.127.2:22") // not ours
	f.add("unix", "/run/x.sock", "ssh-tunnel://...")
	rig := start(t, f)
	static := []string{"tcp/127.0.0.1:2222 to 192.168.127.2:22", "unix//run/x.sock to ssh-tunnel://..."}
	rig.Put(
		peertest.Pub(t, "tcp 0.0.0.0:8080", "127.0.0.1:8080"),
		peertest.Pub(t, "udp 0.0.0.0:8080", "127.0.0.1:8080"),
		peertest.Pub(t, "tcp 0.0.0.0:9090+", "127.0.0.1:9090"),
		peertest.Pub(t, "tcp [::]:9090+", "[::1]:9090"),
		peertest.Pub(t, "tcp 0.0.0.0:80", "127.0.0.1:8000"),
	)
	f.want(sortedStrings(
		"tcp/127.0.0.1:8000 to 192.168.127.2:80", "tcp/127.0.0.1:8080 to 192.168.127.2:8080",
		"tcp/127.0.0.1:9090 to 192.168.127.2:9090", "tcp/[::1]:9090 to 192.168.127.2:9090",
		"udp/127.0.0.1:8080 to 192.168.127.2:8080", static[0], static[1])...)
	rig.WantState("udp 0.0.0.0:8080", port.Active)
	rig.Remove("tcp 0.0.0.0:8080", "tcp 0.0.0.0:9090", "tcp [::]:9090")
	f.want(sortedStrings("tcp/127.0.0.1:8000 to 192.168.127.2:80", "udp/127.0.0.1:8080 to 192.168.127.2:8080", static[0], static[1])...)
	// Rancher Desktop's agent names no protocol here, and its context has ended.
	rig.Stop()
	f.want(static...)
}

func sortedStrings(s ...string) []string {
	slices.Sort(s)
	return s
}

// Rancher Desktop's agent sends nothing to a peer that was restarted.
func TestPeerRestartIsResynced(t *testing.T) {
	f := newForwarder(t)
	rig := start(t, f)
	rig.Put(peertest.Pub(t, "tcp 0.0.0.0:8080", "127.0.0.1:8080"))
	f.want("tcp/127.0.0.1:8080 to 192.168.127.2:8080")
	for range 3 {
		f.stop()
		rig.WantState("tcp 0.0.0.0:8080", port.Pending)
		f.start()
		f.want("tcp/127.0.0.1:8080 to 192.168.127.2:8080")
		rig.WantState("tcp 0.0.0.0:8080", port.Active)
	}
}

func TestPeerRestartBetweenTwoCalls(t *testing.T) {
	f := newForwarder(t)
	restarts := make(chan struct{}, 2)
	for range cap(restarts) {
		restarts <- struct{}{}
	}
	var restarting sync.Mutex
	var work sync.WaitGroup
	defer work.Wait()
	f.after = func(path string) {
		if path != "expose" {
			return
		}
		select {
		case <-restarts:
			f.set(func() { f.entries = make(map[string]forward) }) // as after a restart
			work.Go(func() {
				restarting.Lock() // a call in flight can cause the second one meanwhile
				defer restarting.Unlock()
				f.stop()
				f.start()
			})
		default:
		}
	}
	rig := start(t, f)
	rig.Put(peertest.Pub(t, "tcp 0.0.0.0:8080", "127.0.0.1:8080"), peertest.Pub(t, "tcp 0.0.0.0:9090", "127.0.0.1:9090"))
	f.want("tcp/127.0.0.1:8080 to 192.168.127.2:8080", "tcp/127.0.0.1:9090 to 192.168.127.2:9090")
	rig.WantState("tcp 0.0.0.0:8080", port.Active)
	rig.WantState("tcp 0.0.0.0:9090", port.Active)
}

// In Rancher Desktop's agent a peer that does not answer blocks everything for ever.
func TestHangingPeerLeavesPortsPending(t *testing.T) {
	f := newForwarder(t)
	rig := start(t, f, quick)
	rig.Put(peertest.Pub(t, "tcp 0.0.0.0:8080", "127.0.0.1:8080"))
	rig.WantState("tcp 0.0.0.0:8080", port.Active)
	f.set(func() { f.answer = hang })
	rig.Put(peertest.Pub(t, "tcp 0.0.0.0:9090", "127.0.0.1:9090"))
	wait.Until(t, "the reason is reported", func() error {
		for _, k := range []string{"tcp 0.0.0.0:8080", "tcp 0.0.0.0:9090"} {
			if o := rig.Outcomes(k); len(o) != 1 || o[0].State != port.Pending || !strings.Contains(o[0].Reason.String(), "no answer within") {
				return fmt.Errorf("%+v", o)
			}
		}
		return nil
	})
	f.set(func() { f.answer = nil })
	f.want("tcp/127.0.0.1:8080 to 192.168.127.2:8080", "tcp/127.0.0.1:9090 to 192.168.127.2:9090")
	rig.WantState("tcp 0.0.0.0:9090", port.Active)
}

// The call was carried out, and its answer lost.
func TestLostAnswerLeavesEntryOurs(t *testing.T) {
	f := newForwarder(t)
	lost := make(chan struct{}, 1)
	lost <- struct{}{}
	f.answer = func(w http.ResponseWriter, r *http.Request) bool {
		if !strings.HasSuffix(r.URL.Path, "/expose") {
			return false
		}
		select {
		case <-lost:
			f.serve(w, r, "expose")
			return hang(w, r)
		default:
			return false
		}
	}
	rig := start(t, f, quick)
	rig.Put(peertest.Pub(t, "tcp 0.0.0.0:8080", "127.0.0.1:8080"))
	rig.WantState("tcp 0.0.0.0:8080", port.Active)
	rig.Remove("tcp 0.0.0.0:8080")
	f.want()
}

func TestInvalidListIsNotAnEmptyList(t *testing.T) {
	for _, tt := range []struct {
		name, reason string
		answer       func(http.ResponseWriter)
	}{
		{"an error", "answered 500", func(w http.ResponseWriter) { http.Error(w, "out of order", 500) }},
		{"another service", "no list of forwards", func(w http.ResponseWriter) { _, _ = w.Write([]byte("<html>")) }},
		{"null", "no list of forwards", func(w http.ResponseWriter) { _, _ = w.Write([]byte("null")) }},
		{"a redirect", "answered 302", func(w http.ResponseWriter) {
			w.Header().Set("Location", "http://127.0.0.1:1/")
			w.WriteHeader(http.StatusFound)
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := newForwarder(t)
			rig := start(t, f)
			rig.Put(peertest.Pub(t, "tcp 0.0.0.0:8080", "127.0.0.1:8080"))
			rig.WantState("tcp 0.0.0.0:8080", port.Active)
			f.set(func() {
				f.answer = func(w http.ResponseWriter, _ *http.Request) bool {
					tt.answer(w)
					return true
				}
			})
			rig.Put(peertest.Pub(t, "tcp 0.0.0.0:9090", "127.0.0.1:9090"))
			wait.Until(t, "the peer is given up", func() error {
				o := rig.Outcomes("tcp 0.0.0.0:9090")
				if len(o) != 1 || o[0].State == port.Active || !strings.Contains(o[0].Reason.String(), strings.Fields(tt.reason)[0]) {
					return fmt.Errorf("%+v", o)
				}
				return nil
			})
			f.stop() // its connection ends, so that it must be looked at
			f.start()
			wait.Until(t, "the reason is reported", func() error {
				o := rig.Outcomes("tcp 0.0.0.0:9090")
				if len(o) != 1 || o[0].State != port.Pending || !strings.Contains(o[0].Reason.String(), tt.reason) {
					return fmt.Errorf("%+v", o)
				}
				return nil
			})
			f.set(func() { f.answer = nil })
			f.want("tcp/127.0.0.1:8080 to 192.168.127.2:8080", "tcp/127.0.0.1:9090 to 192.168.127.2:9090")
		})
	}
}

func TestRefusalsAreRetriedWithBackoff(t *testing.T) {
	f := newForwarder(t)
	rig := start(t, f)
	refusals := []struct {
		key, host, words string
		state            port.State
		reason           string
	}{
		{"tcp 0.0.0.0:8081", "127.0.0.1:8081", "bind: address already in use", port.Conflict, "another program of the host holds 127.0.0.1:8081"},
		{
			"tcp 0.0.0.0:8082", "127.0.0.1:8082",
			"bind: Only one usage of each socket address (protocol/network address/port) is normally permitted.", port.Conflict, "another program",
		},
		{"tcp 0.0.0.0:81", "127.0.0.1:81", "bind: permission denied", port.Failed, "ports below 1024"},
		{
			"tcp 0.0.0.0:8083", "127.0.0.1:8083",
			"bind: An attempt was made to access a socket in a way forbidden by its access permissions.", port.Failed, "reserved",
		},
		{"tcp 0.0.0.0:8084", "10.1.2.3:8084", "bind: cannot assign requested address", port.Failed, "10.1.2.3 is no address of the host"},
		{"tcp 0.0.0.0:8085", "127.0.0.1:8085", "something\nelse\x1b[2J", port.Failed, "something"},
	}
	for _, tt := range refusals {
		f.set(func() { f.refuse["tcp/"+tt.host] = tt.words })
		rig.Put(peertest.Pub(t, tt.key, tt.host))
		o := rig.WantState(tt.key, tt.state)
		if !strings.Contains(o.Reason.String(), tt.reason) || strings.ContainsAny(o.Reason.String(), "\n\x1b") {
			t.Errorf("%s: reason = %q, want %q in it", tt.key, o.Reason, tt.reason)
		}
	}
	// Other changes do not cause a retry.
	before := len(f.changes())
	for range 20 {
		rig.Put(peertest.Pub(t, "tcp 0.0.0.0:9000", "127.0.0.1:9000"))
		rig.WantState("tcp 0.0.0.0:9000", port.Active)
		rig.Remove("tcp 0.0.0.0:9000")
		f.want()
		rig.WantGone("tcp 0.0.0.0:9000")
	}
	if n := len(f.changes()) - before - 40; n > 60 { // 240 if each were
		t.Errorf("%d attempts at what was refused", n)
	}
}

func TestFreedHostPortIsTaken(t *testing.T) {
	f := newForwarder(t)
	rig := start(t, f, func(o *Options) { o.retryMax = time.Second })
	f.set(func() { f.refuse["tcp/127.0.0.1:8081"] = "bind: address already in use" })
	rig.Put(peertest.Pub(t, "tcp 0.0.0.0:8081", "127.0.0.1:8081"))
	rig.WantState("tcp 0.0.0.0:8081", port.Conflict)
	f.set(func() { delete(f.refuse, "tcp/127.0.0.1:8081") }) // the other program ends
	rig.WantState("tcp 0.0.0.0:8081", port.Active)
}

func TestEntriesOfOthersAreLeftAlone(t *testing.T) {
	f := newForwarder(t)
	f.add("tcp", "127.0.0.1:8080", "192.168.127.3:80")
	f.add("tcp", "127.0.0.1:6443", "192.168.127.2:6443")
	f.add("tcp", ":9090", "192.168.127.2:9090") // as Podman asks for it
	rig := start(t, f)
	rig.Put(
		peertest.Pub(t, "tcp 0.0.0.0:8080", "127.0.0.1:8080"),
		peertest.Pub(t, "tcp 0.0.0.0:6443+", "127.0.0.1:6443"),
		peertest.Pub(t, "tcp 0.0.0.0:9090", "127.0.0.1:9090"),
	)
	rig.WantReason("tcp 0.0.0.0:8080", port.Conflict, `"192.168.127.3:80"`)
	rig.WantState("tcp 0.0.0.0:6443", port.Active) // it is served
	rig.WantState("tcp 0.0.0.0:9090", port.Active)
	rig.Remove("tcp 0.0.0.0:8080", "tcp 0.0.0.0:6443", "tcp 0.0.0.0:9090")
	rig.Put(peertest.Pub(t, "tcp 0.0.0.0:7070", "127.0.0.1:7070"))
	rig.WantState("tcp 0.0.0.0:7070", port.Active)
	rig.Stop()
	f.want("tcp/127.0.0.1:6443 to 192.168.127.2:6443", "tcp/127.0.0.1:8080 to 192.168.127.3:80", "tcp/:9090 to 192.168.127.2:9090")
	for _, c := range f.changes() {
		if !strings.HasSuffix(c, ":7070") {
			t.Errorf("the peer was asked to %s", c)
		}
	}
}

func TestEntryRemovedByOthersIsRestored(t *testing.T) {
	f := newForwarder(t)
	rig := start(t, f, func(o *Options) { o.Audit = 20 * time.Millisecond })
	rig.Put(peertest.Pub(t, "tcp 0.0.0.0:8080", "127.0.0.1:8080"))
	rig.WantState("tcp 0.0.0.0:8080", port.Active)
	f.set(func() { f.entries = make(map[string]forward) })
	f.want("tcp/127.0.0.1:8080 to 192.168.127.2:8080")
}

func TestEntriesOfKilledAgentAreTakenOver(t *testing.T) {
	f := newForwarder(t)
	f.add("tcp", "127.0.0.1:8080", "192.168.127.2:8080")
	f.add("tcp", "127.0.0.1:9090", "192.168.127.2:9090")
	f.add("tcp", "127.0.0.1:7070", "192.168.127.9:7070") // taken by another since
	memory := peer.Memory(filepath.Join(t.TempDir(), "gvproxy.json"))
	var left []peer.Entry
	for _, n := range []string{"8080", "9090", "7070"} {
		left = append(left, peer.Entry{
			Protocol: port.TCP, Host: peertest.Pub(t, "tcp 0.0.0.0:1", "127.0.0.1:"+n).Decision.Host[0], Remote: "192.168.127.2:" + n,
		})
	}
	if err := memory.Save(left); err != nil {
		t.Fatal(err)
	}
	rig := start(t, f, func(o *Options) { o.Memory = memory })
	rig.Put(peertest.Pub(t, "tcp 0.0.0.0:8080", "127.0.0.1:8080"))
	f.want("tcp/127.0.0.1:7070 to 192.168.127.9:7070", "tcp/127.0.0.1:8080 to 192.168.127.2:8080")
	rig.Stop()
	f.want("tcp/127.0.0.1:7070 to 192.168.127.9:7070")
	if left, err := memory.Load(); err != nil || len(left) > 0 {
		t.Errorf("memory: %v, %v", left, err)
	}
}

// Where the peer cannot have the wildcard, the other publications of its server are served
// each at its own address.
func TestRefusedWildcardLeavesNarrowAddresses(t *testing.T) {
	f := newForwarder(t)
	rig := start(t, f, func(o *Options) { o.narrowMin = 100 * time.Millisecond })
	web := func(key, host string) port.Publication {
		p := peertest.Pub(t, key, host)
		p.Owner = port.Owner{Kind: port.OwnerService, ID: "default/web", Name: "web"}
		return p
	}
	all, node := "tcp 0.0.0.0:80", "tcp 192.168.127.2:80"
	f.set(func() { f.refuse["tcp/0.0.0.0:80"] = "bind: address already in use" })
	rig.Put(web(all, "0.0.0.0:80"))
	rig.WantState(all, port.Conflict)
	rig.Put(web(node, "127.0.0.1:80"))
	f.want("tcp/127.0.0.1:80 to 192.168.127.2:80")
	rig.WantState(node, port.Active)
	rig.WantReason(all, port.Conflict, "another program of the host holds 0.0.0.0:80")
	f.set(func() { delete(f.refuse, "tcp/0.0.0.0:80") }) // the other program ends
	f.want("tcp/0.0.0.0:80 to 192.168.127.2:80")
	rig.WantState(all, port.Active)
	rig.WantState(node, port.Active)
}

// When nobody asks for narrower addresses any more, the wildcard is tried at once.
func TestRefusedWildcardIsTriedWhenItIsAlone(t *testing.T) {
	f := newForwarder(t)
	rig := start(t, f, func(o *Options) { o.narrowMin = time.Hour })
	f.set(func() { f.refuse["tcp/0.0.0.0:80"] = "bind: address already in use" })
	for key, host := range map[string]string{"tcp 0.0.0.0:80": "0.0.0.0:80", "tcp 192.168.127.2:80": "127.0.0.1:80"} {
		p := peertest.Pub(t, key, host)
		p.Owner = port.Owner{Kind: port.OwnerService, ID: "default/web", Name: "web"}
		rig.Put(p)
	}
	f.want("tcp/127.0.0.1:80 to 192.168.127.2:80")
	f.set(func() { delete(f.refuse, "tcp/0.0.0.0:80") })
	rig.Remove("tcp 192.168.127.2:80")
	f.want("tcp/0.0.0.0:80 to 192.168.127.2:80")
	rig.WantState("tcp 0.0.0.0:80", port.Active)
}

func TestUnreachablePublicationFails(t *testing.T) {
	f := newForwarder(t)
	rig := start(t, f)
	for _, tt := range []struct{ key, host, reason string }{
		{"tcp 127.0.0.1:81", "127.0.0.1:81", "serves 127.0.0.1 alone"},
		{"tcp [::]:82", "[::1]:82", "serves :: alone"},
		{"tcp 0.0.0.0:84", "127.0.0.1:0", "a rule must name one"},
	} {
		rig.Put(peertest.Pub(t, tt.key, tt.host))
		rig.WantReason(tt.key, port.Failed, tt.reason)
	}
	rig.Put(peertest.Pub(t, "tcp 192.168.127.2:85", "127.0.0.1:85"))
	rig.WantState("tcp 192.168.127.2:85", port.Active)
}

func TestFirstWorkingURLIsUsed(t *testing.T) {
	f := newForwarder(t)
	rig := start(t, f, func(o *Options) {
		o.URLs = []string{"http://127.0.0.1:1", "unix://" + filepath.Join(t.TempDir(), "none.sock"), f.url()}
	})
	rig.Put(peertest.Pub(t, "tcp 0.0.0.0:8080", "127.0.0.1:8080"))
	f.want("tcp/127.0.0.1:8080 to 192.168.127.2:8080")
}

func TestInvalidURLs(t *testing.T) {
	for _, u := range []string{
		"https://127.0.0.1", "http://", "http://h/path", "unix://relative", "http://h?guest=::1", "http://h?guest=x", "http://h?peer=x", "http://h?other=1",
	} {
		if _, err := New(Options{URLs: []string{u}, Logger: slog.New(slog.DiscardHandler)}); err == nil || !strings.Contains(err.Error(), u) {
			t.Errorf("%s: error = %v", u, err)
		}
	}
	if s, err := New(Options{Logger: slog.New(slog.DiscardHandler)}); err != nil || len(s.apis) == 0 {
		t.Errorf("defaults: %v", err)
	}
}

// bridges close each connection: only the entries matter.
func bridges(o *Options) {
	o.Bridges = peer.NewBridges(peer.BridgeOptions{
		Loopback: true,
		Listen:   new(net.ListenConfig).Listen, ListenPacket: new(own.Sockets).ListenPacket,
		Serve:  func(_ context.Context, c net.Conn, _ port.Publication) error { return c.Close() },
		Logger: slog.New(slog.DiscardHandler),
	})
}

// Whoever reaches the peer would reach what the guest meant for itself.
func TestLoopbackIsNotBridgedUnasked(t *testing.T) {
	f := newForwarder(t)
	rig := start(t, f, func(o *Options) {
		o.URLs = []string{"http://" + f.address + "?guest=127.0.1.2"}
		o.Bridges = peer.NewBridges(peer.BridgeOptions{
			Listen: new(net.ListenConfig).Listen, ListenPacket: new(own.Sockets).ListenPacket, Logger: slog.New(slog.DiscardHandler),
		})
	})
	rig.Put(peertest.Pub(t, "tcp 127.0.0.1:81", "127.0.0.1:81"), peertest.Pub(t, "tcp [::1]:82", "[::1]:82"), peertest.Pub(t, "tcp 0.0.0.0:83", "127.0.0.1:83"))
	rig.WantState("tcp 0.0.0.0:83", port.Active)
	for _, k := range []string{"tcp 127.0.0.1:81", "tcp [::1]:82"} {
		rig.WantState(k, port.Failed)
	}
	f.want("tcp/127.0.0.1:83 to 127.0.1.2:83")
}

func TestUnreachablePublicationGetsABridge(t *testing.T) {
	f := newForwarder(t)
	rig := start(t, f, bridges, func(o *Options) { o.URLs = []string{"http://" + f.address + "?guest=127.0.1.2"} })
	rig.Put(
		peertest.Pub(t, "tcp 127.0.0.1:81", "127.0.0.1:81"), peertest.Pub(t, "tcp [::1]:82", "[::1]:82"),
		peertest.Pub(t, "tcp 0.0.0.0:83", "127.0.0.1:83"), peertest.Pub(t, "udp 127.0.0.1:84", "127.0.0.1:84"),
	)
	inner := peertest.Pub(t, "tcp 0.0.0.0:85", "127.0.0.1:85")
	inner.Origins[0].Inner = true
	rig.Put(inner)
	for _, k := range []string{"tcp 127.0.0.1:81", "tcp [::1]:82", "tcp 0.0.0.0:83", "tcp 0.0.0.0:85"} {
		rig.WantState(k, port.Active)
	}
	rig.WantState("udp 127.0.0.1:84", port.Active)
	var at []string
	for _, e := range f.state() {
		local, remote, _ := strings.Cut(e, " to ")
		if local == "tcp/127.0.0.1:83" {
			if remote != "127.0.1.2:83" {
				t.Errorf("what the peer reaches goes by %s", remote)
			}
			continue
		}
		if strings.HasPrefix(local, "udp") {
			continue
		}
		at = append(at, remote)
		// It is open, and for the peer alone, which the forwarder's address is.
		if err := probe.Want(probe.Reset, probe.From("127.0.1.1", remote), ""); err != nil {
			t.Errorf("%s: %v", e, err)
		}
	}
	if len(at) != 3 {
		t.Errorf("bridges at %q, want three", at)
	}
	rig.Remove("tcp 127.0.0.1:81", "tcp [::1]:82", "udp 127.0.0.1:84", "tcp 0.0.0.0:85")
	f.want("tcp/127.0.0.1:83 to 127.0.1.2:83")
	for _, a := range at {
		wait.Until(t, "the bridge "+a+" is closed", func() error { return probe.WantClosed(probe.At(a)) })
	}
}

// The peer's list of forwards, and its errors: an entry that is understood is one address
// and port, which the peer is asked to remove by the same words.
func FuzzForwards(f *testing.F) {
	f.Add([]byte(`[{"local":"127.0.0.1:8080","remote":"192.168.127.2:8080","protocol":"tcp"},{"local":":53","protocol":"udp"}]`))
	f.Add([]byte(`[{"local":"/tmp/podman.sock","remote":"ssh-tunnel://root@192.168.127.2:22","protocol":"unix"}]`))
	f.Add([]byte(`[{"local":"[::]:80","protocol":"tcp"},{"local":"localhost:1","protocol":"tcp"},{"local":"[fe80::1%eth0]:1","protocol":"tcp"}]`))
	f.Add([]byte("proxy already running\nlisten tcp 127.0.0.1:80: bind: address already in use"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if line := firstLine(b); len(line) > 203 || strings.ContainsAny(line, "\x00\r\n\x1b\x7f") || !utf8.ValidString(line) {
			t.Errorf("line %q", line)
		}
		all, err := decodeForwards(b)
		if err != nil {
			return
		}
		for _, e := range all {
			target, ok := parse(e)
			if !ok {
				continue
			}
			if target.Host.Is4In6() {
				t.Errorf("%+v is %+v", e, target)
			}
			again, ok := parse(forward{Local: target.AddrPort().String(), Protocol: target.Protocol.String()})
			if !ok || again != target {
				t.Errorf("%+v is %+v, read again as %+v", e, target, again)
			}
		}
	})
}
