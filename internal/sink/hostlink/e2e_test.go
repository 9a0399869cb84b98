// SPDX-License-Identifier: Apache-2.0

package hostlink

import (
	"context"
	"log/slog"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/reconcile"
	"github.com/fairlead/fairlead/internal/table"
)

// The whole guest side: table, reconciler, sink and unix listener, with a host
// that redials, in both directions of dialling.
func TestThroughTheReconciler(t *testing.T) {
	for name, agentDials := range map[string]bool{"host dials": false, "agent dials": true} {
		t.Run(name, func(t *testing.T) {
			e := link.Endpoint{Network: link.NetworkUnix, Path: filepath.Join(t.TempDir(), "d", "s")}
			ao := link.Options{Role: link.RoleAgent, Identity: "A", Logger: discard()}
			ho := link.Options{Role: link.RoleHost, Identity: "H", Name: "desk", Logger: discard()}
			lo, do := ao, ho
			if agentDials {
				lo, do = ho, ao
			}
			l, err := link.Listen(t.Context(), e, lo)
			if err != nil {
				t.Fatal(err)
			}
			d, err := link.NewRedialer(e, do)
			if err != nil {
				t.Fatal(err)
			}
			var forAgent, forHost Acceptor = l, d
			if agentDials {
				forAgent, forHost = d, l
			}

			from := table.New[port.Key, port.Publication](port.Key.Compare)
			var rec *reconcile.Reconciler
			sink, err := New(forAgent, Options{
				Logger: discard(), Serve: echo, ServeUDP: echoUDP,
				Lookup: func(k port.Key) (port.Publication, bool) { return rec.Wanted().View().Get(k) },
			})
			if err != nil {
				t.Fatal(err)
			}
			rec = reconcile.New(from, nil, reconcile.Options{
				Logger: slog.New(slog.DiscardHandler), Denied: sink.Reset, Follower: sink,
			})

			ctx, cancel := context.WithCancel(context.Background())
			var wg sync.WaitGroup
			wg.Go(func() { _ = sink.Run(ctx) })
			wg.Go(func() { _ = rec.Run(ctx) })
			hosts := make(chan *peer, 10)
			wg.Go(func() {
				for {
					s, err := forHost.Accept(ctx)
					if err != nil {
						return
					}
					p := newPeer(t, s)
					wg.Go(p.serve)
					hosts <- p
				}
			})
			t.Cleanup(func() {
				cancel()
				_ = l.Close()
				for len(hosts) > 0 {
					_ = (<-hosts).Close()
				}
				wg.Wait()
			})

			update := func(f func(tx *table.Tx[port.Key, port.Publication])) { from.Update(f) }
			update(func(tx *table.Tx[port.Key, port.Publication]) { tx.Put(key(80), pub(key(80), "web")) })
			first := <-hosts
			settled(t, rec, key(80), port.Active)
			st, _ := first.open(key(80))
			if !alive(st) {
				t.Error("no flow")
			}

			update(func(tx *table.Tx[port.Key, port.Publication]) { tx.Put(key(81), pub(key(81), "db")) })
			settled(t, rec, key(81), port.Active)

			// The host goes: pending. It comes again: active.
			_ = first.Close()
			second := <-hosts
			settled(t, rec, key(80), port.Active)
			settled(t, rec, key(81), port.Active)
			st, _ = second.open(key(81))
			if !alive(st) {
				t.Error("no flow")
			}

			// A rule denies: the flow is reset.
			update(func(tx *table.Tx[port.Key, port.Publication]) {
				p := pub(key(81), "db")
				p.Decision.Allow = false
				tx.Put(key(81), p)
			})
			if _, err := st.Read(make([]byte, 1)); err == nil {
				t.Error("flow outlived the rule")
			}
			_ = second.Close()
		})
	}
}

// settled waits until the sink's outcome of k is state.
func settled(t *testing.T, rec *reconcile.Reconciler, k port.Key, state port.State) {
	t.Helper()
	sub := rec.Outcomes().Subscribe()
	defer sub.Close()
	late := time.After(2 * time.Minute)
	for {
		select {
		case <-sub.C():
		case <-late:
			t.Fatalf("%s does not become %s", k, state)
		}
		view, _ := sub.Take()
		if out, _ := view.Get(k); slices.ContainsFunc(out, func(o port.SinkOutcome) bool { return o.State == state }) {
			return
		}
	}
}
