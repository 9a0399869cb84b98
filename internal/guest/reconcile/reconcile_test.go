// SPDX-License-Identifier: Apache-2.0

package reconcile

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

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/schedule"
	"github.com/fairlead/fairlead/internal/port/table"
	"github.com/fairlead/fairlead/internal/testkit/leak"
)

func TestMain(m *testing.M) { leak.Main(m) }

// fakeSink holds what it was given, may fail, and applies only what the hint
// names, so that a wrong hint shows.
type fakeSink struct {
	mu    sync.Mutex
	held  map[port.Key]port.Publication
	fail  func() error
	syncs int
	wake  chan struct{}

	incomplete func(generation uint64) []string // the reconciler's, nil if not of interest
	missing    []string                         // what it returned last
	onSync     func(View, []string)
}

func newSink() *fakeSink {
	return &fakeSink{held: map[port.Key]port.Publication{}}
}

func (s *fakeSink) Name() string          { return "fake" }
func (s *fakeSink) Wake() <-chan struct{} { return s.wake }

func (s *fakeSink) Sync(ctx context.Context, want View, c Change) (port.Outcomes, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.syncs++
	if s.incomplete != nil {
		s.missing = s.incomplete(want.Generation())
	}
	if s.onSync != nil {
		s.onSync(want, s.missing)
	}
	if s.fail != nil {
		if err := s.fail(); err != nil {
			return nil, err
		}
	}
	out := port.Outcomes{}
	for _, k := range c.Keys {
		p, ok := want.Get(k)
		if !ok {
			delete(s.held, k)
			continue
		}
		s.held[k] = p
		out[k] = []port.Outcome{{State: port.Active, HostAddress: k.AddrPort()}}
	}
	return out, ctx.Err()
}

func (s *fakeSink) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.syncs
}

func (s *fakeSink) keys() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []string
	for k := range s.held {
		out = append(out, k.String())
	}
	slices.Sort(out)
	return out
}

func pub(addr string, allow bool) port.Publication {
	ap := netip.MustParseAddrPort(addr)
	return port.Publication{
		Fact: port.Fact{
			Key:      port.Key{Protocol: port.TCP, Address: ap.Addr(), Port: ap.Port()},
			Decision: port.Decision{Allow: allow, Host: []netip.AddrPort{netip.AddrPortFrom(port.Loopback(ap.Addr()), ap.Port())}},
		},
	}
}

type rig struct {
	pubs *table.Table[port.Key, port.Publication]
	r    *Reconciler
}

func (g rig) put(p port.Publication) {
	g.pubs.Update(func(tx *table.Tx[port.Key, port.Publication]) { tx.Put(p.Key, p) })
}

func (g rig) drop(p port.Publication) {
	g.pubs.Update(func(tx *table.Tx[port.Key, port.Publication]) { tx.Delete(p.Key) })
}

// run starts a reconciler in a bubble of fake time and ends it after f.
func run(t *testing.T, o Options, sinks []Sink, f func(rig)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		for _, s := range sinks {
			if f, ok := s.(*fakeSink); ok {
				f.wake = make(chan struct{}, 1) // belongs to the bubble
			}
		}
		o.Logger = slog.New(slog.DiscardHandler)
		ready := make(chan struct{})
		o.Ready = ready
		if o.ReadyTimeout == 0 { // a test that sets it wants to wait
			close(ready)
		}
		g := rig{pubs: table.New[port.Key, port.Publication](port.Key.Compare)}
		g.r = New(g.pubs, sinks, o)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			_ = g.r.Run(ctx)
		}()
		f(g)
		cancel()
		<-done
	})
}

func want(t *testing.T, s *fakeSink, keys ...string) {
	t.Helper()
	synctest.Wait()
	if got := s.keys(); !slices.Equal(got, keys) {
		t.Errorf("the sink holds %q, want %q", got, keys)
	}
}

func TestHoldDown(t *testing.T) {
	s := newSink()
	run(t, Options{HoldDown: 150 * time.Millisecond}, []Sink{s}, func(g rig) {
		p := pub("127.0.0.1:80", true)
		g.put(p)
		want(t, s, "tcp 127.0.0.1:80")
		g.drop(p)
		time.Sleep(149 * time.Millisecond)
		want(t, s, "tcp 127.0.0.1:80")
		time.Sleep(time.Millisecond)
		want(t, s)
	})
}

func TestReturnDuringHoldDownChangesNothing(t *testing.T) {
	s := newSink()
	run(t, Options{HoldDown: 150 * time.Millisecond}, []Sink{s}, func(g rig) {
		p := pub("127.0.0.1:80", true)
		g.put(p)
		want(t, s, "tcp 127.0.0.1:80")
		before := s.count()
		for range 20 {
			g.drop(p)
			time.Sleep(100 * time.Millisecond)
			g.put(p)
			time.Sleep(10 * time.Millisecond)
		}
		want(t, s, "tcp 127.0.0.1:80")
		if n := s.count(); n != before {
			t.Errorf("%d syncs for a publication that stayed", n-before)
		}
		time.Sleep(time.Second)
		want(t, s, "tcp 127.0.0.1:80")
	})
}

func TestWhatIsAskedForByNameIsNotHeld(t *testing.T) {
	s := newSink()
	run(t, Options{HoldDown: time.Minute}, []Sink{s}, func(g rig) {
		p := pub("172.17.0.2:80", true)
		p.SetNamed("", []string{"web:80/tcp"})
		g.put(p)
		want(t, s, "tcp 172.17.0.2:80")
		g.drop(p)
		want(t, s)
	})
}

// A server that is restarted in one family is held in the other, and blocks nobody there.
func TestFamilyThatIsGoneIsHeld(t *testing.T) {
	s := newSink()
	run(t, Options{HoldDown: 150 * time.Millisecond}, []Sink{s}, func(g rig) {
		v4, v6 := pub("0.0.0.0:80", true), pub("[::]:80", true)
		g.put(v4)
		g.put(v6)
		want(t, s, "tcp 0.0.0.0:80", "tcp [::]:80")
		g.drop(v6)
		want(t, s, "tcp 0.0.0.0:80", "tcp [::]:80")
		time.Sleep(200 * time.Millisecond)
		want(t, s, "tcp 0.0.0.0:80")
	})
}

func TestDenyTakesEffectAtOnce(t *testing.T) {
	s := newSink()
	var denied []port.Key // read once the reconciler is idle
	o := Options{HoldDown: time.Minute, Denied: func(ks []port.Key) { denied = append(denied, ks...) }}
	run(t, o, []Sink{s}, func(g rig) {
		g.put(pub("127.0.0.1:80", true))
		want(t, s, "tcp 127.0.0.1:80")
		g.put(pub("127.0.0.1:80", false))
		want(t, s)
		if len(denied) != 1 {
			t.Errorf("denied = %v", denied)
		}
	})
}

// A server that closes its listener may still hold the port for a moment.
func TestWithheldIsHeldAndNotDenied(t *testing.T) {
	s := newSink()
	var denied []port.Key
	o := Options{HoldDown: 150 * time.Millisecond, Denied: func(ks []port.Key) { denied = append(denied, ks...) }}
	run(t, o, []Sink{s}, func(g rig) {
		p := pub("127.0.0.1:80", true)
		g.put(p)
		want(t, s, "tcp 127.0.0.1:80")
		p.Decision = port.Decision{Reason: port.Because(port.Unlistened)}
		g.put(p)
		want(t, s, "tcp 127.0.0.1:80")
		g.drop(p)
		time.Sleep(time.Second)
		want(t, s)
		if len(denied) != 0 {
			t.Errorf("denied = %v", denied)
		}
	})
}

// A port whose owner became uncertain may turn out to be forbidden.
func TestPendingIsNotHeldAndResetsOnceDenied(t *testing.T) {
	s := newSink()
	var reset []port.Key
	o := Options{HoldDown: time.Minute, Denied: func(ks []port.Key) { reset = append(reset, ks...) }}
	run(t, o, []Sink{s}, func(g rig) {
		p := pub("127.0.0.1:80", true)
		g.put(p)
		want(t, s, "tcp 127.0.0.1:80")
		for _, d := range []port.Decision{{Reason: port.Because(port.OwnerAwaited)}, p.Decision, {Reason: port.Because(port.OwnerAwaited)}} {
			p.Decision = d
			g.put(p)
			synctest.Wait()
		}
		want(t, s)
		if len(reset) != 0 {
			t.Errorf("reset %v while pending", reset)
		}
		g.put(pub("127.0.0.1:80", false))
		want(t, s)
		if len(reset) != 1 {
			t.Errorf("reset %v once denied, want one port", reset)
		}
	})
}

func TestWithheldPortAllowsHoldOnSlot(t *testing.T) {
	s := newSink()
	run(t, Options{HoldDown: time.Minute}, []Sink{s}, func(g rig) {
		old, other := pub("[::]:80", true), pub("0.0.0.0:80", false)
		other.Decision.Reason = port.Because(port.Unlistened)
		g.put(other)
		g.put(old)
		want(t, s, "tcp [::]:80")
		g.drop(old)
		want(t, s, "tcp [::]:80")
	})
}

func TestFailedSyncIsRetriedAndLosesNothing(t *testing.T) {
	s := newSink()
	fails := 7
	s.fail = func() error {
		if fails--; fails >= 0 {
			return errors.New("peer hung")
		}
		return nil
	}
	run(t, Options{}, []Sink{s}, func(g rig) {
		p := pub("127.0.0.1:80", true)
		g.put(p)
		synctest.Wait()
		if outs, _ := g.r.Outcomes().View().Get(p.Key); len(outs) != 1 || outs[0].State != port.Failed || outs[0].Reason.String() != "peer hung" {
			t.Errorf("outcomes after a failure = %+v", outs)
		}
		time.Sleep(30 * time.Second)
		want(t, s, "tcp 127.0.0.1:80")
		if outs, _ := g.r.Outcomes().View().Get(p.Key); len(outs) != 1 || outs[0].State != port.Active {
			t.Errorf("outcomes after success = %+v", outs)
		}
		st := g.r.Stats()
		if len(st) != 1 || st[0].Sink != "fake" || st[0].Failures != 7 || st[0].Syncs == 0 || st[0].Retries < 5 || st[0].Retries > 7 {
			t.Errorf("stats = %+v", st)
		}
	})
}

type hungSink struct{ fakeSink }

func (h *hungSink) Name() string { return "hung" }

func (h *hungSink) Sync(ctx context.Context, _ View, _ Change) (port.Outcomes, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}

func TestHungSinkBlocksNoOther(t *testing.T) {
	s := newSink()
	run(t, Options{}, []Sink{&hungSink{}, s}, func(g rig) {
		p := pub("127.0.0.1:80", true)
		g.put(p)
		want(t, s, "tcp 127.0.0.1:80")
		time.Sleep(5 * time.Second)
		synctest.Wait()
		outs, _ := g.r.Outcomes().View().Get(p.Key)
		if len(outs) != 2 || outs[0].Sink != "fake" || outs[0].State != port.Active || outs[1].State != port.Failed {
			t.Errorf("outcomes = %+v", outs)
		}
	})
}

// Synced is called with the times of events, for what a sink made active, after it succeeded.
func TestSyncedHasTimesOfEvents(t *testing.T) {
	s := newSink()
	var works atomic.Bool
	s.fail = func() error {
		if !works.Load() {
			return errors.New("peer hung")
		}
		return nil
	}
	got := make(chan []int64, 10)
	synced := func(sink string, observed []int64) {
		if sink != "fake" {
			t.Errorf("synced by %q", sink)
		}
		got <- observed
	}
	run(t, Options{Synced: synced}, []Sink{s}, func(g rig) {
		seen, dumped, denied := pub("127.0.0.1:80", true), pub("127.0.0.1:81", true), pub("127.0.0.1:82", false)
		seen.Observed, denied.Observed = 7, 8
		for _, p := range []port.Publication{seen, dumped, denied} {
			g.put(p)
		}
		synctest.Wait()
		if len(got) > 0 {
			t.Errorf("synced %v after a failure", <-got)
		}
		works.Store(true)
		time.Sleep(30 * time.Second)
		synctest.Wait()
		g.drop(seen)
		synctest.Wait()
	})
	if n := len(got); n != 1 {
		t.Fatalf("synced %d times, want once", n)
	}
	if observed := <-got; !slices.Equal(observed, []int64{7}) {
		t.Errorf("synced %v, want 7", observed)
	}
}

// A source that still reads its first set is waited for longer, but not for ever.
func TestSlowFirstSetIsAwaited(t *testing.T) {
	for name, c := range map[string]struct{ reads, want time.Duration }{
		"ends":  {10 * time.Second, 10 * time.Second},
		"hangs": {time.Hour, readingMax},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSink()
			begin := time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC) // of the fake clock
			reading := func(ctx context.Context) { _ = schedule.Sleep(ctx, time.Until(begin.Add(c.reads))) }
			run(t, Options{ReadyTimeout: 3 * time.Second, Reading: reading}, []Sink{s}, func(g rig) {
				g.put(pub("127.0.0.1:80", true))
				time.Sleep(c.want - time.Second)
				synctest.Wait()
				if n := s.count(); n != 0 {
					t.Errorf("%d syncs while a source reads its first set", n)
				}
				time.Sleep(2 * time.Second)
				want(t, s, "tcp 127.0.0.1:80")
			})
		})
	}
}

func TestWakeSyncsAgain(t *testing.T) {
	s := newSink()
	run(t, Options{}, []Sink{s}, func(rig) {
		synctest.Wait()
		before := s.count()
		s.wake <- struct{}{}
		synctest.Wait()
		if n := s.count(); n != before+1 {
			t.Errorf("%d syncs after a wake", n-before)
		}
	})
}

func TestIdleReconcilerHasNoTimers(t *testing.T) {
	s := newSink()
	run(t, Options{HoldDown: 150 * time.Millisecond}, []Sink{s}, func(g rig) {
		p := pub("127.0.0.1:80", true)
		g.put(p)
		g.drop(p)
		time.Sleep(time.Second)
		synctest.Wait()
		before := s.count()
		time.Sleep(24 * time.Hour)
		synctest.Wait()
		if n := s.count(); n != before {
			t.Errorf("%d syncs in an idle day", n-before)
		}
	})
}
