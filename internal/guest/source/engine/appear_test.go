// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"errors"
	"log/slog"
	"net/http/httptrace"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead/fairlead/internal/config/rules"
	"github.com/fairlead/fairlead/internal/guest/registry"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/schedule"
)

// supervised is a source of a real registry whose rules deny what "secret" owns.
type supervised struct {
	r     *registry.Registry
	feed  registry.Feed
	nat   registry.Feed
	facts Table
	wake  schedule.Signal
}

var secret = port.Key{Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: 8080}

// newRegistry returns a registry with the facts of a source, whose rules deny what has a name.
func newRegistry(t *testing.T, facts *Table, denied string) *registry.Registry {
	t.Helper()
	deny, err := rules.New(rules.Loopback(), []rules.Rule{{Match: rules.Match{Name: denied}, Deny: true}})
	if err != nil {
		t.Fatal(err)
	}
	r := registry.New(registry.Options{Rules: deny, Logger: slog.New(slog.DiscardHandler)})
	r.AddFacts("docker", facts)
	done := make(chan struct{})
	go func() { defer close(done); _ = r.Run(t.Context()) }()
	t.Cleanup(func() { <-done })
	return r
}

// sourceState returns the state of the source of newRegistry.
func sourceState(r *registry.Registry) (state registry.SourceState) {
	for _, source := range r.Sources().View().All() {
		if source.Name == "docker" {
			state = source.State
		}
	}
	return state
}

func newSupervised(t *testing.T) *supervised {
	t.Helper()
	s := &supervised{wake: schedule.NewSignal()}
	s.r = newRegistry(t, &s.facts, "secret")
	s.feed, s.nat = s.r.Feed("docker"), s.r.Feed("nat")
	s.nat.Replace(nil)
	return s
}

func (s *supervised) run(t *testing.T, d time.Duration, session Session) {
	t.Helper()
	_ = supervise(t, d, Supervisor{Feed: s.feed, Facts: &s.facts, Wake: s.wake}, session)
}

func (s *supervised) state() registry.SourceState { return sourceState(s.r) }

// secretFact is of the container to which the NAT rule leads.
func secretFact() Fact {
	return Fact{
		Owner:     port.Owner{Kind: port.OwnerContainer, ID: id1, Name: "secret"},
		Addresses: []netip.Addr{netip.MustParseAddr("172.17.0.2")},
	}
}

// publish makes a NAT rule to a container of which no engine has reported.
func (s *supervised) publish() {
	s.nat.Replace([]port.Binding{{
		Key: secret, Origin: port.Origin{ID: "rule"},
		Hints: port.Hints{Targets: []netip.AddrPort{netip.MustParseAddrPort("172.17.0.2:80")}},
	}})
}

// From the first trace of an engine to its first list, what it may own waits for it.
func TestAppearedEngineIsStaleUntilListed(t *testing.T) {
	for name, appear := range map[string]func(context.Context, *supervised){
		"woken": func(context.Context, *supervised) {},
		"connected at a try": func(ctx context.Context, _ *supervised) {
			httptrace.ContextClientTrace(ctx).ConnectDone("unix", "docker.sock", nil)
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newSupervised(t)
				if name == "woken" {
					wake := time.AfterFunc(time.Minute, s.wake.Notify)
					defer wake.Stop()
				}
				tries := 0
				s.run(t, 20*time.Minute, func(ctx context.Context, up func()) error {
					if tries++; tries == 1 {
						return ErrAbsent
					}
					if state := s.state(); state != registry.Live && name != "woken" {
						t.Errorf("state %s before there was an engine", state)
					}
					appear(ctx, s)
					s.publish()
					time.Sleep(3 * time.Minute) // it restores containers
					p, _ := s.r.Publications().View().Get(secret)
					if state := s.state(); state != registry.Stale || p.Decision.Allow || !p.Decision.Pending() {
						t.Errorf("before the first list: %s, decision %+v; want stale and pending", state, p.Decision)
					}
					s.facts.Put("c", secretFact())
					s.feed.Replace(nil)
					up()
					httptrace.ContextClientTrace(ctx).ConnectDone("unix", "docker.sock", nil)
					time.Sleep(time.Minute)
					p, _ = s.r.Publications().View().Get(secret)
					if state := s.state(); state != registry.Live || p.Decision.Allow || p.Decision.Pending() {
						t.Errorf("after the first list: %s, decision %+v; want live and denied", state, p.Decision)
					}
					<-ctx.Done()
					return ctx.Err()
				})
				if tries != 2 {
					t.Errorf("%d tries, want two", tries)
				}
			})
		})
	}
}

// A socket that appears and goes again before anybody listened is no engine.
func TestSocketThatAppearsAndGoesIsNoEngine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSupervised(t)
		wake := time.AfterFunc(time.Minute, s.wake.Notify)
		defer wake.Stop()
		tries := 0
		s.run(t, 2*time.Minute, func(context.Context, func()) error { tries++; return ErrAbsent })
		if state := s.state(); state != registry.Live || tries != 2 {
			t.Errorf("%s after %d tries, want live after two", state, tries)
		}
	})
}

// An engine is forgotten ten minutes after the last sign of it, whatever was before.
func TestForgottenAfterAbsenceOnly(t *testing.T) {
	errSlow := errors.New("no answer within 10s")
	const gone = 30 * time.Minute
	for name, before := range map[string]func(at time.Duration, up func()) error{
		"listed, then hanging": func(at time.Duration, up func()) error {
			if at == 0 {
				up()
			}
			return errSlow
		},
		"never listed": func(time.Duration, func()) error { return errSlow },
		"absent for a moment": func(at time.Duration, up func()) error {
			switch {
			case at == 0:
				up()
			case at >= 12*time.Minute && at < 14*time.Minute:
				return ErrAbsent
			case at >= 19*time.Minute && at < 21*time.Minute:
				return Refused(errGone)
			}
			return errSlow
		},
	} {
		for kind, absent := range map[string]error{"no socket": ErrAbsent, "nobody listens": Refused(errGone)} {
			t.Run(name+", "+kind, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					s := newSupervised(t)
					began, tries := time.Now(), 0
					var lost, last time.Duration // when it was seen to be gone, and last seen stale
					s.run(t, gone+time.Hour, func(_ context.Context, up func()) error {
						at := time.Since(began)
						if tries++; tries > 1 && s.state() == registry.Stale {
							last = at
						}
						if at < gone {
							return before(at, up)
						}
						if lost == 0 {
							lost = at
						}
						return absent
					})
					if d := last - lost; d < forgetAfter/2 || d > forgetAfter+time.Minute || s.state() != registry.Live {
						t.Errorf("last seen stale %v after it was gone, then %s; want %v and live", d, s.state(), forgetAfter)
					}
				})
			})
		}
	}
}

// A socket that was left behind, and refuses, is no engine after ten minutes; one that
// listens again is found at a try.
func TestRefusingSocketIsForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSupervised(t)
		began := time.Now()
		var live time.Duration
		s.run(t, 2*time.Hour, func(ctx context.Context, up func()) error {
			at, state := time.Since(began), s.state()
			switch {
			case live == 0 && at > 0 && state == registry.Live:
				live = at
			case live > 0 && state != registry.Live:
				t.Errorf("%s at %v, though it was forgotten at %v", state, at, live)
			}
			if at < time.Hour {
				return Refused(errGone)
			}
			if at > time.Hour+2*DefaultMaxDelay {
				t.Errorf("first try at %v, want it soon after the engine listens again", at)
			}
			httptrace.ContextClientTrace(ctx).ConnectDone("unix", "docker.sock", nil)
			if state := s.state(); state != registry.Stale {
				t.Errorf("%s once the engine accepts, want stale until it is listed", state)
			}
			up()
			<-ctx.Done()
			return ctx.Err()
		})
		if live < forgetAfter || live > forgetAfter+2*DefaultMaxDelay {
			t.Errorf("forgotten at %v, want %v", live, forgetAfter)
		}
	})
}
