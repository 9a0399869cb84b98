// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/config/rules"
	"github.com/fairlead/fairlead/internal/guest/reconcile"
	"github.com/fairlead/fairlead/internal/guest/registry"
	"github.com/fairlead/fairlead/internal/guest/sink/vtunnel"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/testkit/leak"
	"github.com/fairlead/fairlead/internal/testkit/peertest"
)

func TestMain(m *testing.M) { leak.Main(m) }

// newChain is registry, reconciler and the vtunnel sink, with a peer behind it.
func newChain(t *testing.T, sources ...string) (*peertest.Receiver, []registry.Feed) {
	t.Helper()
	r := peertest.NewReceiver(t, "unix", filepath.Join(t.TempDir(), "s"), net.Listen)
	log := slog.New(slog.DiscardHandler)
	// No slow machine is taken for a peer that does not answer.
	sink, err := vtunnel.New(vtunnel.Options{URL: r.URL(), Logger: log, Timeout: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	reg := registry.New(registry.Options{Rules: rules.Empty(rules.Loopback()), Logger: log})
	feeds := make([]registry.Feed, len(sources))
	for i, s := range sources {
		feeds[i] = reg.Feed(s)
	}
	for _, f := range feeds {
		f.Replace(nil)
	}
	rec := reconcile.New(reg.Publications(), []reconcile.Sink{sink}, reconcile.Options{Ready: reg.Ready(), Logger: log})
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	for _, run := range []func(context.Context) error{rec.Run, sink.Run} {
		wg.Go(func() {
			if err := run(ctx); !errors.Is(err, context.Canceled) {
				t.Errorf("run: %v", err)
			}
		})
	}
	t.Cleanup(func() { cancel(); wg.Wait() })
	return r, feeds
}

func binding(source, id string, p port.Protocol, n uint16) port.Binding {
	return port.Binding{
		Key:    port.Key{Protocol: p, Address: netip.IPv4Unspecified(), Port: n},
		Origin: port.Origin{Source: source, ID: id},
	}
}

func put(bs ...port.Binding) port.Change { return port.Change{Put: bs} }

func drop(source string, ids ...string) (c port.Change) {
	for _, id := range ids {
		c.Drop = append(c.Drop, port.Origin{Source: source, ID: id})
	}
	return c
}

// The incumbent counts no references across its sources: the first of two that
// leaves takes the port along, and what the other still wants is gone.
func TestPortOfTwoSources(t *testing.T) {
	peer, feeds := newChain(t, "docker", "kube")
	feeds[0].Apply(put(binding("docker", "c1", port.TCP, 80)))
	feeds[1].Apply(put(binding("kube", "default/web", port.TCP, 80)))
	peer.Want("80/tcp 127.0.0.1 to upstream")
	sent := len(peer.Messages())
	feeds[0].Apply(drop("docker", "c1"))
	feeds[0].Apply(put(binding("docker", "c2", port.TCP, 81))) // something to wait for
	peer.Want("80/tcp 127.0.0.1 to upstream", "81/tcp 127.0.0.1 to upstream")
	if m := peer.Messages(); len(m) != sent+1 {
		t.Errorf("the peer was sent %q", m[sent:])
	}
	feeds[1].Apply(drop("kube", "default/web"))
	peer.Want("81/tcp 127.0.0.1 to upstream")
}

// The incumbent, when one engine's stream is lost, removes everything of all
// sources, and the others never add theirs again.
func TestLostSource(t *testing.T) {
	peer, feeds := newChain(t, "docker", "kube")
	feeds[0].Apply(put(binding("docker", "c1", port.TCP, 80)))
	feeds[1].Apply(put(binding("kube", "default/web", port.TCP, 30080)))
	peer.Want("30080/tcp 127.0.0.1 to upstream", "80/tcp 127.0.0.1 to upstream")
	feeds[0].Stale(errors.New("stream lost"))
	feeds[1].Apply(put(binding("kube", "default/db", port.TCP, 30090)))
	peer.Want("30080/tcp 127.0.0.1 to upstream", "30090/tcp 127.0.0.1 to upstream", "80/tcp 127.0.0.1 to upstream")
	feeds[0].Replace(nil) // the engine is back, without the container
	peer.Want("30080/tcp 127.0.0.1 to upstream", "30090/tcp 127.0.0.1 to upstream")
}

// The incumbent, when a Service gains port 443, forgets its port 80, which then
// stays open when the Service goes.
func TestServiceGainsPort(t *testing.T) {
	peer, feeds := newChain(t, "kube")
	feeds[0].Apply(put(binding("kube", "default/web/80", port.TCP, 80)))
	peer.Want("80/tcp 127.0.0.1 to upstream")
	feeds[0].Apply(put(binding("kube", "default/web/443", port.TCP, 443)))
	peer.Want("443/tcp 127.0.0.1 to upstream", "80/tcp 127.0.0.1 to upstream")
	feeds[0].Apply(drop("kube", "default/web/80", "default/web/443"))
	peer.Want()
}

// The incumbent's removal of everything names no protocol: UDP stays on the host,
// and a later add of it fails.
func TestUDPIsWithdrawnAndComesBack(t *testing.T) {
	peer, feeds := newChain(t, "docker")
	for range 3 {
		feeds[0].Replace([]port.Binding{binding("docker", "a", port.UDP, 5000), binding("docker", "b", port.TCP, 5000)})
		peer.Want("5000/tcp 127.0.0.1 to upstream", "5000/udp 127.0.0.1 to upstream")
		feeds[0].Replace(nil)
		peer.Want()
	}
}

// Two listeners of one port, by SO_REUSEPORT or at two addresses, take it from each other
// at each scan of the incumbent.
func TestTwoListenersOfOnePort(t *testing.T) {
	peer, feeds := newChain(t, "socket")
	feeds[0].Apply(put(binding("socket", "1", port.TCP, 80), binding("socket", "2", port.TCP, 80)))
	local := binding("socket", "3", port.TCP, 80)
	local.Address = netip.MustParseAddr("192.168.143.1") // at which wsl-proxy finds the guest
	feeds[0].Apply(put(local))
	peer.Want("80/tcp 127.0.0.1 to upstream")
	sent := len(peer.Messages())
	for range 20 { // scans
		feeds[0].Apply(put(binding("socket", "1", port.TCP, 80), binding("socket", "2", port.TCP, 80), local))
	}
	feeds[0].Apply(drop("socket", "1"))
	feeds[0].Apply(put(binding("socket", "4", port.TCP, 81))) // something to wait for
	peer.Want("80/tcp 127.0.0.1 to upstream", "81/tcp 127.0.0.1 to upstream")
	if m := peer.Messages(); len(m) != sent+1 {
		t.Errorf("the peer was sent %q", m[sent:])
	}
	feeds[0].Apply(drop("socket", "2", "3"))
	peer.Want("81/tcp 127.0.0.1 to upstream")
}
