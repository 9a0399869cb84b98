// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead/fairlead/internal/guest/registry"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/table"
)

// slowSink takes a while for each Sync and notices those that overtake others.
type slowSink struct {
	*fakeSink
	running atomic.Int32
	last    uint64
	rng     *rand.Rand
	t       *testing.T
}

func (s *slowSink) Sync(ctx context.Context, want View, c Change) (port.Outcomes, error) {
	if s.running.Add(1) != 1 {
		s.t.Error("two Syncs at one time")
	}
	defer s.running.Add(-1)
	if want.Generation() < s.last {
		s.t.Errorf("generation %d after %d", want.Generation(), s.last)
	}
	s.last = want.Generation()
	time.Sleep(time.Duration(s.rng.IntN(20)) * time.Millisecond)
	return s.fakeSink.Sync(ctx, want, c)
}

// The incumbent starts a goroutine for each add and each remove, and what comes
// last at the peer is a matter of luck.
func TestAddsAndRemovesKeepTheirOrder(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	s := &slowSink{fakeSink: newSink(), rng: rand.New(rand.NewPCG(1, 2)), t: t}
	synctest.Test(t, func(t *testing.T) {
		s.wake = make(chan struct{}, 1)
		g := rig{pubs: table.New[port.Key, port.Publication](port.Key.Compare)}
		g.r = New(g.pubs, []Sink{s}, Options{Logger: slog.New(slog.DiscardHandler)})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { defer close(done); _ = g.r.Run(ctx) }()
		a, b := pub("127.0.0.1:80", true), pub("127.0.0.1:81", true)
		for range 500 {
			g.put(a)
			g.put(b)
			time.Sleep(time.Duration(rng.IntN(15)) * time.Millisecond)
			g.drop(a)
			time.Sleep(time.Duration(rng.IntN(15)) * time.Millisecond)
		}
		time.Sleep(time.Second)
		want(t, s.fakeSink, "tcp 127.0.0.1:81")
		cancel()
		<-done
	})
}

// sourced is a sink behind a registry with two sources.
func sourced(t *testing.T, f func(s *fakeSink, docker, containerd registry.Feed)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		s := newSink()
		s.wake = make(chan struct{}, 1)
		log := slog.New(slog.DiscardHandler)
		reg := registry.New(registry.Options{Rules: allowAll{}, Logger: log})
		docker, containerd := reg.Feed("docker"), reg.Feed("containerd")
		r := New(reg.Publications(), []Sink{s}, Options{Ready: reg.Ready(), Missing: reg.Incomplete, Logger: log})
		s.incomplete = r.Incomplete
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { defer close(done); _ = r.Run(ctx) }()
		f(s, docker, containerd)
		cancel()
		<-done
	})
}

type allowAll struct{}

func (allowAll) Decide(port.Publication) port.Ruling {
	return port.Ruling{Decision: port.Decision{Allow: true}}
}

func binding(id, addr string) port.Binding {
	return port.Binding{Key: pub(addr, true).Key, Origin: port.Origin{ID: id}}
}

// The incumbent removes the ports of all sources when one engine's stream
// breaks, and the other sources never add theirs again.
func TestLostEngineRemovesNoPort(t *testing.T) {
	sourced(t, func(s *fakeSink, docker, containerd registry.Feed) {
		docker.Replace([]port.Binding{binding("a", "0.0.0.0:80")})
		containerd.Replace([]port.Binding{binding("b", "0.0.0.0:81")})
		want(t, s, "tcp 0.0.0.0:80", "tcp 0.0.0.0:81")
		syncs := s.count()
		docker.Stale(errors.New("the stream broke"))
		want(t, s, "tcp 0.0.0.0:80", "tcp 0.0.0.0:81")
		if n := s.count(); n != syncs {
			t.Errorf("%d Syncs because a source is stale", n-syncs)
		}
		docker.Replace([]port.Binding{binding("c", "0.0.0.0:82")})
		want(t, s, "tcp 0.0.0.0:81", "tcp 0.0.0.0:82")
	})
}

// A set that lacks what a source has not reported yet is never taken for a complete one,
// and every sink is synced again when it is complete, also if nothing changed.
func TestIncompleteUntilAllIsApplied(t *testing.T) {
	for name, last := range map[string][]port.Binding{"ports": {binding("b", "0.0.0.0:81")}, "no ports": nil} {
		t.Run(name, func(t *testing.T) {
			sourced(t, func(s *fakeSink, docker, containerd registry.Feed) {
				docker.Replace([]port.Binding{binding("a", "0.0.0.0:80")})
				time.Sleep(time.Minute)
				want(t, s, "tcp 0.0.0.0:80")
				wantMissing(t, s, "containerd")
				docker.Apply(port.Change{Put: []port.Binding{binding("c", "0.0.0.0:82")}})
				want(t, s, "tcp 0.0.0.0:80", "tcp 0.0.0.0:82")
				wantMissing(t, s, "containerd")
				containerd.Replace(last)
				synctest.Wait()
				wantMissing(t, s)
				if n := len(s.keys()); n != 2+len(last) {
					t.Errorf("the sink holds %q", s.keys())
				}
				syncs := s.count()
				time.Sleep(time.Hour)
				if n := s.count(); n != syncs {
					t.Errorf("%d more Syncs", n-syncs)
				}
			})
		})
	}
}

func TestCompleteFromTheFirstSync(t *testing.T) {
	sourced(t, func(s *fakeSink, docker, containerd registry.Feed) {
		docker.Replace(nil)
		containerd.Replace(nil)
		synctest.Wait()
		wantMissing(t, s)
		if n := s.count(); n != 1 {
			t.Errorf("%d Syncs", n)
		}
	})
}

// A source that reports while sinks are synced: the first Sync without a missing source has
// its ports.
func TestIncompleteSetIsNotReported(t *testing.T) {
	for seed := range uint64(50) {
		rng := rand.New(rand.NewPCG(1, seed))
		sourced(t, func(s *fakeSink, docker, containerd registry.Feed) {
			s.mu.Lock()
			s.onSync = func(view View, missing []string) {
				if _, ok := view.Get(pub("0.0.0.0:81", true).Key); !ok && len(missing) == 0 {
					t.Errorf("seed %d: generation %d is complete without the port", seed, view.Generation())
				}
			}
			s.mu.Unlock()
			docker.Replace(nil)
			time.Sleep(time.Minute)
			go func() {
				for range rng.IntN(5) {
					docker.Apply(port.Change{Put: []port.Binding{binding("a", "0.0.0.0:80")}})
					docker.Apply(port.Change{Drop: []port.Origin{{Source: "docker", ID: "a"}}})
				}
			}()
			containerd.Replace([]port.Binding{binding("b", "0.0.0.0:81")})
			synctest.Wait()
			wantMissing(t, s)
		})
	}
}

func wantMissing(t *testing.T, s *fakeSink, sources ...string) {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	if !slices.Equal(s.missing, sources) {
		t.Errorf("missing in the last Sync: %q, want %q", s.missing, sources)
	}
}
