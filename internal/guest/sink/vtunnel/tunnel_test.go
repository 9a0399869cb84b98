// SPDX-License-Identifier: Apache-2.0

package vtunnel

import (
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/guest/sink/peer"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/testkit/peertest"
	"github.com/fairlead/fairlead/internal/testkit/ports"
	"github.com/fairlead/fairlead/internal/testkit/wait"
)

// newTunnel returns a receiver behind a tunnel, and the sink's URL of it.
func newTunnel(t *testing.T) (*peertest.Receiver, *peertest.Tunnel, string) {
	t.Helper()
	r := newReceiver(t, "tcp")
	n := peertest.NewTunnel(t, fmt.Sprintf("127.0.0.1:%d", ports.Free(t)), r)
	return r, n, n.URL() + "?interface=lo"
}

// The tunnel answers the end of our side at once, before the service has read the
// message, and the service handles each connection by itself: what is active must be
// done, and removals and additions must not overtake each other.
func TestMessagesThroughTunnelWaitForTheService(t *testing.T) {
	r, _, url := newTunnel(t)
	r.Slow(20 * time.Millisecond)
	rig := peertest.New(t, newSink(t, url))
	for n := range 5 {
		var want []string
		for i := range 10 {
			rig.Put(peertest.Pub(t, fmt.Sprintf("tcp 0.0.0.0:%d", 9000+i), fmt.Sprintf("127.0.0.1:%d", 9000+i)))
			want = append(want, fmt.Sprintf("%d/tcp 127.0.0.1 to 127.0.0.1:%d", 9000+i, 9000+i))
		}
		for i := range 10 {
			rig.WantState(fmt.Sprintf("tcp 0.0.0.0:%d", 9000+i), port.Active)
		}
		if got := r.State(); !slices.Equal(got, want) {
			t.Fatalf("round %d: ten ports are active, and the peer has %q", n, got)
		}
		for i := range 10 {
			rig.Remove(fmt.Sprintf("tcp 0.0.0.0:%d", 9000+i))
		}
		r.Want()
		for i := range 10 {
			rig.WantGone(fmt.Sprintf("tcp 0.0.0.0:%d", 9000+i))
		}
	}
}

// The service ends a message at the first binding for which netsh fails.
func TestPrivilegedServiceGetsOneBindingPerMessage(t *testing.T) {
	r, _, url := newTunnel(t)
	rig := peertest.New(t, newSink(t, url))
	rig.Put(peertest.Pub(t, "tcp 0.0.0.0:81", "127.0.0.1:81"), peertest.Pub(t, "tcp 0.0.0.0:82", "127.0.0.1:82"))
	for _, k := range []string{"tcp 0.0.0.0:81", "tcp 0.0.0.0:82"} {
		rig.WantState(k, port.Active)
	}
	rig.Stop()
	r.Want()
	for _, m := range r.Messages() {
		if n := strings.Count(m, "HostPort"); n != 1 {
			t.Errorf("%d bindings in %s", n, m)
		}
	}
}

// netsh has no entries of UDP: the service would take one for TCP, and its removal would
// close the TCP port of that number.
func TestUDPIsNotSentToThePrivilegedService(t *testing.T) {
	r, _, url := newTunnel(t)
	memory := peer.Memory(filepath.Join(t.TempDir(), "vtunnel.json"))
	left := peer.Entry{Protocol: port.UDP, Host: netip.MustParseAddrPort("127.0.0.1:9054")} // an earlier agent sent it
	if err := memory.Save([]peer.Entry{left}); err != nil {
		t.Fatal(err)
	}
	rig := peertest.New(t, newSink(t, url, func(o *Options) { o.Memory = memory }))
	rig.Put(peertest.Pub(t, "tcp 0.0.0.0:9053", "127.0.0.1:9053"), peertest.Pub(t, "udp 0.0.0.0:9053", "127.0.0.1:9053"))
	rig.WantState("tcp 0.0.0.0:9053", port.Active)
	rig.WantReason("udp 0.0.0.0:9053", port.Failed, "TCP alone")
	rig.Remove("udp 0.0.0.0:9053")
	rig.Put(peertest.Pub(t, "tcp 0.0.0.0:80", "127.0.0.1:80"))
	rig.WantState("tcp 0.0.0.0:80", port.Active)
	r.Want("80/tcp 127.0.0.1 to 127.0.0.1:80", "9053/tcp 127.0.0.1 to 127.0.0.1:9053")
	rig.Stop()
	r.Want()
	for _, m := range r.Messages() {
		if strings.Contains(m, "udp") {
			t.Errorf("sent %s", m)
		}
	}
}

// While Windows is away, each connection ends vtunnel's program in the guest, and its
// supervisor starts it ten times.
func TestTunnelOutlivesWindowsBeingAway(t *testing.T) {
	r, n, url := newTunnel(t)
	rig := peertest.New(t, newSink(t, url))
	for i := range 10 {
		rig.Put(peertest.Pub(t, fmt.Sprintf("tcp 0.0.0.0:%d", 9000+i), fmt.Sprintf("127.0.0.1:%d", 9000+i)))
	}
	rig.WantState("tcp 0.0.0.0:9009", port.Active)
	r.Stop()
	away := time.Now()
	if o := rig.WantState("tcp 0.0.0.0:9000", port.Pending); !strings.Contains(o.Reason.String(), "Windows may not answer") && !strings.Contains(o.Reason.String(), "refused") {
		t.Errorf("reason = %q", o.Reason)
	}
	for i := range 10 { // changes do not make it connect
		k := fmt.Sprintf("tcp 0.0.0.0:%d", 9100+i)
		rig.Put(peertest.Pub(t, k, fmt.Sprintf("127.0.0.1:%d", 9100+i)))
		rig.WantState(k, port.Pending)
	}
	wait.Until(t, "2.5 s are over", func() error {
		if d := time.Since(away); d < 2500*time.Millisecond {
			return fmt.Errorf("%v", d)
		}
		return nil
	})
	elapsed := time.Since(away)
	if deaths := n.Deaths(); elapsed < 6*time.Second && deaths > 5 { // at once, and after 1, 2 and 4 s
		t.Errorf("it died %d times in %v", deaths, elapsed)
	}
	r.Start()
	rig.WantState("tcp 0.0.0.0:9000", port.Active)
	rig.WantState("tcp 0.0.0.0:9109", port.Active)
	if got := len(r.State()); got != 20 {
		t.Errorf("the peer has %d of 20 ports", got)
	}
}

// A peer that hangs leaves ports pending, also those that change meanwhile.
func TestHangingPeerNeverFailsPorts(t *testing.T) {
	r := newReceiver(t, "unix")
	rig := peertest.New(t, newSink(t, r.URL(), func(o *Options) { o.Timeout = 200 * time.Millisecond }))
	rig.Put(peertest.Pub(t, "tcp 0.0.0.0:80", "127.0.0.1:80"))
	rig.WantState("tcp 0.0.0.0:80", port.Active)
	r.Deafen(true)
	for i := range 15 {
		k := fmt.Sprintf("tcp 0.0.0.0:%d", 8000+i)
		rig.Put(peertest.Pub(t, k, fmt.Sprintf("127.0.0.1:%d", 8000+i)))
		if i%3 == 2 { // a removal hangs as well
			rig.Remove("tcp 0.0.0.0:80")
		}
		wait.Until(t, k+" has an outcome", func() error {
			if o := rig.Outcomes(k); len(o) == 0 {
				return net.ErrClosed
			}
			return nil
		})
		for j := range i + 1 {
			for _, o := range rig.Outcomes(fmt.Sprintf("tcp 0.0.0.0:%d", 8000+j)) {
				if o.State != port.Pending {
					t.Fatalf("%+v", o)
				}
			}
		}
	}
	r.Deafen(false)
	rig.WantState("tcp 0.0.0.0:8014", port.Active)
}
