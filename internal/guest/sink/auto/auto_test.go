// SPDX-License-Identifier: Apache-2.0

package auto

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead/fairlead/internal/guest/reconcile"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/schedule"
	"github.com/fairlead/fairlead/internal/port/table"
)

// Links that change all the time have the peer asked once a second.
func TestAutoRestsBetweenQuestions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var asked []time.Time
		u := &Auto{
			log: slog.New(slog.DiscardHandler), slot: reconcile.NewSlot("gvproxy"),
			gvproxy: func(context.Context) (url, product string, err error) {
				asked = append(asked, time.Now())
				return "", "", errors.New("no answer")
			},
		}
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
		defer cancel()
		changed := schedule.NewSignal()
		go func() {
			for start := time.Now(); time.Since(start) < 10*time.Second; time.Sleep(10 * time.Millisecond) {
				changed.Notify()
			}
			time.Sleep(55 * time.Second) // a single change, while the pause is long
			changed.Notify()
		}()
		_ = u.follow(ctx, changed)
		at := false
		for i, now := range asked {
			at = at || now.Sub(asked[0]) == 65*time.Second
			if i > 0 && now.Sub(asked[i-1]) < time.Second {
				t.Fatalf("asked again after %v", now.Sub(asked[i-1]))
			}
		}
		if !at || len(asked) < 10 {
			t.Errorf("asked at %v: want a question right after the last change", asked)
		}
	})
}

// A guest without gvproxy looks for one each five minutes, and soon again after a change.
func TestAutoLooksSeldomWhereNothingChanges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var asked []time.Duration
		began := time.Now()
		u := &Auto{
			log: slog.New(slog.DiscardHandler), slot: reconcile.NewSlot("gvproxy"),
			gvproxy: func(context.Context) (url, product string, err error) {
				asked = append(asked, time.Since(began))
				return "", "", errors.New("no answer")
			},
		}
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Hour)
		defer cancel()
		const at = 2*time.Hour + 10*time.Second
		changed := schedule.NewSignal()
		go func() {
			time.Sleep(at)
			changed.Notify()
		}()
		_ = u.follow(ctx, changed)
		between := func(from, to time.Duration) (in []time.Duration) {
			for _, a := range asked {
				if a >= from && a < to {
					in = append(in, a)
				}
			}
			return in
		}
		if n := len(between(0, time.Minute)); n != 6 { // at 0, 1, 3, 7, 15 and 31 s
			t.Errorf("%d questions in the first minute, want 6", n)
		}
		if n := len(between(time.Hour, 2*time.Hour)); n != 12 {
			t.Errorf("%d questions in the second hour, want 12", n)
		}
		if got, want := between(at, at+2*time.Minute), []time.Duration{at, at + 30*time.Second, at + 90*time.Second}; !slices.Equal(got, want) {
			t.Errorf("after a change at %v asked at %v, want %v", at, got, want)
		}
	})
}

// published is a sink that notes how many ports it publishes.
type published struct {
	name string
	n    atomic.Int64
}

func (p *published) Name() string          { return p.name }
func (p *published) Wake() <-chan struct{} { return nil }

func (p *published) Sync(_ context.Context, want reconcile.View, _ reconcile.Change) (port.Outcomes, error) {
	p.n.Store(int64(want.Len()))
	return nil, nil
}

func (p *published) Run(ctx context.Context) error {
	<-ctx.Done()
	p.n.Store(0)
	return ctx.Err()
}

// While gvproxy is proved, nothing publishes but that; otherwise the fallback does.
func TestGvproxyReplacesTheFallback(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ports := table.New[port.Key, port.Publication](port.Key.Compare)
		ports.Update(func(tx *table.Tx[port.Key, port.Publication]) {
			k := port.Key{Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: 80}
			tx.Put(k, port.Publication{Fact: port.Fact{Key: k}})
		})
		var proof error
		listener, gvproxy := &published{name: "listener"}, &published{name: "gvproxy"}
		u := &Auto{
			log: slog.New(slog.DiscardHandler), slot: reconcile.NewSlot("gvproxy"),
			fallback: &fallback{slot: reconcile.NewSlot("listener"), sink: listener},
			gvproxy:  func(context.Context) (url, product string, err error) { return "http://gateway", "product", proof },
			newSink: func(string) (Sink, error) {
				return gvproxy, nil
			},
		}
		ctx, cancel := context.WithCancel(t.Context())
		var driving sync.WaitGroup
		for _, s := range []*reconcile.Slot{u.slot, u.fallback.slot} {
			driving.Go(func() {
				for schedule.Wait(ctx, time.Time{}, s.Wake()) == nil {
					_, _ = s.Sync(ctx, ports.View(), reconcile.Change{Base: 1})
				}
			})
		}
		look := func(when string, err error, gvproxyPorts, listenerPorts int64) {
			t.Helper()
			proof = err
			_ = u.look(ctx)
			synctest.Wait()
			if g, l := gvproxy.n.Load(), listener.n.Load(); g != gvproxyPorts || l != listenerPorts {
				t.Errorf("%s: gvproxy publishes %d ports, the listener %d, want %d and %d", when, g, l, gvproxyPorts, listenerPorts)
			}
		}
		look("at the start", errors.New("no answer"), 0, 1)
		look("proved", nil, 1, 0)
		look("still proved", nil, 1, 0)
		look("lost", errors.New("a portal answers"), 0, 1)
		look("proved again", nil, 1, 0)
		u.halt(port.Reason{})
		synctest.Wait()
		if l := listener.n.Load(); l != 0 {
			t.Errorf("at the end the listener publishes %d ports", l)
		}
		cancel()
		driving.Wait()
	})
}
