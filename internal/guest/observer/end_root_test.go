// SPDX-License-Identifier: Apache-2.0

//go:build linux && (root || vm)

package observer

import (
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/guest/kernel/bpf"
	"github.com/fairlead/fairlead/internal/testkit/kernels"
	"github.com/fairlead/fairlead/internal/testkit/wait"
)

// TestListenerClosedOrShutDown reads the records themselves: a handler may get two
// at once and then sees only the last.
func TestListenerClosedOrShutDown(t *testing.T) {
	const ringBytes = 64 << 10
	r := newRoom(t)
	o, err := openHooks(nil, ringBytes, r.ns.Inode())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = o.Close() }()
	ring, err := o.Ring(bpf.SockMapEvents, bpf.SockMapControls)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ring.Close() }()
	if err := o.Attach([]string{"tcp_destroy", "tcp_state"}); err != nil {
		t.Fatal(err)
	}
	ring.Control().Bound.Store(1)

	closed := []bpf.SockEventKind{bpf.SockEventKindEVENT_LISTEN, bpf.SockEventKindEVENT_CLOSE}
	shut := []bpf.SockEventKind{bpf.SockEventKindEVENT_LISTEN, bpf.SockEventKindEVENT_UNLISTEN, bpf.SockEventKindEVENT_CLOSE}
	protocols := []struct {
		name   string
		number int
	}{{"tcp", 0}, {"mptcp", kernels.MPTCP()}}
	cases := []struct {
		name string
		end  func(w *world, s sock)
		want []bpf.SockEventKind
	}{
		{"closed", func(_ *world, s sock) { s.close() }, closed},
		{"closed with a connection in its queue", func(w *world, s sock) {
			c := w.tcp4().connect(loopback4(8080))
			s.close()
			c.close()
		}, closed},
		{"shut down and closed", func(_ *world, s sock) { s.shutdown().close() }, shut},
	}
	for _, protocol := range protocols {
		for _, c := range cases {
			t.Run(protocol.name+" "+c.name, func(t *testing.T) {
				w := &world{room: r, t: t}
				t.Cleanup(func() { _, _ = ring.Read(batchLimit, func([]byte) {}) }) // what a failure left
				s := w.socket(unix.AF_INET, unix.SOCK_STREAM, protocol.number).
					option(unix.SOL_SOCKET, unix.SO_REUSEADDR, 1).bind(loopback4(8080)).listen()
				c.end(w, s)
				var got []bpf.SockEventKind
				var decoded record
				for end := time.Now().Add(wait.Limit()); len(got) < len(c.want) && time.Now().Before(end); time.Sleep(time.Millisecond) {
					if _, err := ring.Read(batchLimit, func(sample []byte) {
						if err := newDecoder().decode(sample, &decoded); err != nil {
							t.Error(err)
						}
						got = append(got, decoded.kind)
					}); err != nil {
						t.Fatal(err)
					}
				}
				if !slices.Equal(got, c.want) {
					t.Errorf("records of kind %d, want %d", got, c.want)
				}
			})
		}
	}
}
