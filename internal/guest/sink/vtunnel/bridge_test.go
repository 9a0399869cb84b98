// SPDX-License-Identifier: Apache-2.0

package vtunnel

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"testing"

	"github.com/fairlead/fairlead/internal/guest/sink/peer"
	"github.com/fairlead/fairlead/internal/link/own"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/testkit/peertest"
	"github.com/fairlead/fairlead/internal/testkit/wait"
)

// bridgedRig is a sink whose bridges, at 127.0.1.2, answer with the key of the
// publication that they serve.
func bridgedRig(t *testing.T) *peertest.Rig {
	t.Helper()
	r := newReceiver(t, "unix")
	bridges := peer.NewBridges(peer.BridgeOptions{
		Loopback: true,
		Listen:   new(net.ListenConfig).Listen, ListenPacket: new(own.Sockets).ListenPacket,
		Serve: func(_ context.Context, c net.Conn, p port.Publication) error {
			_, _ = io.WriteString(c, p.Key.String())
			return c.Close()
		},
		Logger: slog.New(slog.DiscardHandler),
	})
	return peertest.New(t, newSink(t, r.URL()+"?guest=127.0.1.2", func(o *Options) { o.Bridges = bridges }))
}

// wantServed waits until the peer reaches a publication at a port.
func wantServed(t *testing.T, number uint16, key string) {
	t.Helper()
	wait.Until(t, key+" is served", func() error {
		d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 1, 1)}}
		c, err := d.Dial("tcp", fmt.Sprintf("127.0.1.2:%d", number))
		if err != nil {
			return err
		}
		defer c.Close()
		if b, err := io.ReadAll(c); err != nil || string(b) != peertest.Key(t, key).String() {
			return fmt.Errorf("read %q, %v", b, err)
		}
		return nil
	})
}

func TestBridgeIsRetried(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.1.2:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	n := uint16(l.Addr().(*net.TCPAddr).Port)
	rig := bridgedRig(t)
	k := fmt.Sprintf("tcp 127.0.0.1:%d", n)
	rig.Put(peertest.Pub(t, k, fmt.Sprintf("127.0.0.1:%d", n)))
	rig.WantState(k, port.Failed)
	_ = l.Close()
	rig.WantState(k, port.Active)
	wantServed(t, n, k)
}
