// SPDX-License-Identifier: Apache-2.0

package nat

import (
	"context"
	"errors"
	"net/netip"
	"runtime"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"
	"weak"

	"github.com/google/go-cmp/cmp"

	"github.com/fairlead/fairlead/internal/guest/netwatch"
	"github.com/fairlead/fairlead/internal/guest/source/nat/compile"
	"github.com/fairlead/fairlead/internal/guest/source/nat/ruleset"
	"github.com/fairlead/fairlead/internal/guest/source/nat/watch"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/schedule"
	"github.com/fairlead/fairlead/internal/testkit/leak"
	"github.com/fairlead/fairlead/internal/testkit/natrules"
)

// fakeSystem is a kernel whose ruleset the test sets.
type fakeSystem struct {
	mu        sync.Mutex
	snap      *ruleset.Snapshot
	dumpErr   error
	dumps     int
	v4        bool
	blob      []byte
	reads     int
	readTime  time.Duration
	dumpTime  time.Duration
	events    chan batch
	hosts     schedule.Signal
	addresses []string      // beside 192.0.2.2
	broken    bool          // there are no notifications
	orders    int           // readings of one chain
	ordering  time.Duration // what such a reading takes
	overtake  bool          // a commit overtakes it
	filtered  bool          // commits to other tables are left out
	passed    uint32        // generation of the last commit that was not
}

func newFake(s *ruleset.Snapshot) *fakeSystem {
	s.Generation = 1
	return &fakeSystem{snap: s}
}

type fakeStream struct {
	f      *fakeSystem
	events <-chan batch
	closed chan struct{}
}

func (s fakeStream) Next() ([]*ruleset.Message, error) {
	select {
	case b := <-s.events:
		return b.msgs, b.err
	case <-s.closed:
		return nil, errors.New("closed")
	}
}

func (s fakeStream) Filtered() bool { return s.f.filtered }

func (s fakeStream) Passed() (uint32, error) {
	s.f.mu.Lock()
	defer s.f.mu.Unlock()
	return s.f.passed, nil
}

func (s fakeStream) Close() error { close(s.closed); return nil }

func (f *fakeSystem) Watch() (watch.Stream, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.broken {
		return nil, errors.New("no notifications")
	}
	return fakeStream{f, f.events, make(chan struct{})}, nil
}

func (f *fakeSystem) NetworkChanged() <-chan struct{} { return f.hosts }

func (f *fakeSystem) Generation() (uint32, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.snap.Generation, nil
}

func (f *fakeSystem) set(s *ruleset.Snapshot, gen uint32, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	s.Generation = gen
	f.snap, f.dumpErr = s, err
}

func (f *fakeSystem) Dump(context.Context) (*ruleset.Snapshot, error) {
	time.Sleep(f.dumpTime)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.dumps++
	if f.dumpErr != nil {
		return nil, f.dumpErr
	}
	return f.snap, nil
}

func (f *fakeSystem) Rules(id ruleset.ChainID) ([]ruleset.Rule, error) {
	time.Sleep(f.ordering)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.orders++
	var err error
	if f.overtake {
		err = watch.ErrMoved
	}
	for _, t := range f.snap.Tables {
		for _, c := range t.Chains {
			if t.ID == id.Table && c.Name == id.Name {
				return c.Rules, err
			}
		}
	}
	return nil, err
}

func (f *fakeSystem) Exists(t ruleset.TableID) (bool, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.ContainsFunc(f.snap.Tables, func(ts *ruleset.Table) bool { return ts.ID == t }), nil
}

func (f *fakeSystem) LegacyTables() (v4, v6 bool, err error) { return f.v4, false, nil }

func (f *fakeSystem) Legacy(v6 bool) (*ruleset.Table, error) {
	time.Sleep(f.readTime)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.reads++
	return ruleset.ParseLegacy(v6, ruleset.LegacyInfo{ValidHooks: 1}, f.blob)
}

func (f *fakeSystem) readCount() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.reads
}

func (f *fakeSystem) Network() (netwatch.Snapshot, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := netwatch.Snapshot{
		Links:    []netwatch.Link{{Index: 2, Name: "eth0"}},
		Defaults: []netwatch.Route{{Dst: netip.MustParsePrefix("0.0.0.0/0"), Link: 2}},
	}
	for _, a := range append([]string{"192.0.2.2/32"}, f.addresses...) {
		n.Local = append(n.Local, netwatch.Route{Dst: netip.MustParsePrefix(a), Link: 2})
	}
	return n, nil
}

// give gives the machine another address.
func (f *fakeSystem) give(address string) {
	f.mu.Lock()
	f.addresses = append(f.addresses, address)
	f.mu.Unlock()
	f.hosts.Notify()
}

// recorder keeps what a source publishes.
type recorder struct {
	mu       sync.Mutex
	set      map[string]port.Binding
	replaced int
	applied  int
	stale    error
	method   string
}

func (r *recorder) Replace(set []port.Binding) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.set = map[string]port.Binding{}
	for _, b := range set {
		r.set[b.Origin.ID] = b
	}
	r.replaced++
	r.stale = nil
}

func (r *recorder) Apply(c port.Change) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, o := range c.Drop {
		delete(r.set, o.ID)
	}
	for _, b := range c.Put {
		r.set[b.Origin.ID] = b
	}
	r.applied++
}

func (r *recorder) Stale(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.stale = err
}

func (r *recorder) Warn([]string) {}

func (r *recorder) Lacks(_ port.Lack, why string) { r.Method(why) }

func (r *recorder) Method(name string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.method = name
}

func (r *recorder) methodNow() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.method
}

func (r *recorder) ports() []int {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := []int{}
	for _, b := range r.set {
		out = append(out, int(b.Port))
	}
	slices.Sort(out)
	return out
}

func (r *recorder) isStale() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.stale
}

func oneTable(ports ...uint16) *ruleset.Snapshot {
	t := &ruleset.Table{ID: natrules.Table, Chains: natrules.BaseChains()}
	for i, p := range ports {
		t.Chains[0].Rules = append(t.Chains[0].Rules, ruleset.Rule{Handle: uint64(100 + i), Raw: natrules.Join(natrules.TCP(), natrules.Dport(p), natrules.DNAT("10.0.0.1", 80))})
	}
	return &ruleset.Snapshot{Tables: []*ruleset.Table{t}}
}

func commitOf(gen uint32, msgs ...*ruleset.Message) batch {
	return batch{msgs: append(msgs, &ruleset.Message{Type: ruleset.MsgNewGen, Generation: gen})}
}

func newRule(handle uint64, p uint16) *ruleset.Message {
	return &ruleset.Message{Type: ruleset.MsgNewRule, Append: true, Table: natrules.Table, Chain: "pre", Handle: handle, Raw: natrules.Join(natrules.TCP(), natrules.Dport(p), natrules.DNAT("10.0.0.1", 80))}
}

// run runs a source over f in a bubble of fake time, and test beside it.
func run(t *testing.T, opt Options, f *fakeSystem, test func(s *Source, r *recorder)) {
	t.Helper()
	bubble(t, opt, f, func(s *Source, r *recorder) (func(context.Context) error, func()) {
		open := func() (system, func(), error) { return f, func() {}, nil }
		return func(ctx context.Context) error { return s.runWith(ctx, r, open) }, func() { test(s, r) }
	})
}

// runSession is run for one session, at which test may look while it waits.
func runSession(t *testing.T, f *fakeSystem, test func(x *session, r *recorder)) {
	t.Helper()
	bubble(t, Options{}, f, func(s *Source, r *recorder) (func(context.Context) error, func()) {
		x := newSession(s, r, compile.New(s.opt.MaxPorts), f)
		return x.run, func() { test(x, r) }
	})
}

// bubble makes a source in a bubble of fake time, and runs what begin returns side by side.
func bubble(t *testing.T, opt Options, f *fakeSystem, begin func(s *Source, r *recorder) (work func(context.Context) error, test func())) {
	t.Helper()
	if len(opt.Methods) == 0 {
		opt.Methods = []string{MethodNetlink}
	}
	synctest.Test(t, func(t *testing.T) {
		// Channels belong to the bubble that they are made in.
		f.events, f.hosts = make(chan batch), schedule.NewSignal()
		f.hosts.Notify()
		if w, ok := opt.Wake.(*wakes); ok {
			w.c = make(chan struct{}, 1)
		}
		s, err := New(opt)
		if err != nil {
			t.Fatal(err)
		}
		work, test := begin(s, &recorder{})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- work(ctx) }()
		synctest.Wait()
		test()
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

func expectPorts(t *testing.T, r *recorder, want ...int) {
	t.Helper()
	synctest.Wait()
	if d := cmp.Diff(want, r.ports()); d != "" {
		t.Errorf("ports (-want +got):\n%s", d)
	}
}

func TestCommitIsOneStep(t *testing.T) {
	f := newFake(oneTable(80))
	run(t, Options{}, f, func(_ *Source, r *recorder) {
		expectPorts(t, r, 80)
		f.events <- batch{msgs: []*ruleset.Message{newRule(1, 81)}}
		expectPorts(t, r, 80)
		f.events <- commitOf(2, newRule(2, 82))
		expectPorts(t, r, 80, 81, 82)
		if r.applied != 1 || r.replaced != 1 || f.dumps != 1 {
			t.Errorf("applied %d, replaced %d, dumps %d", r.applied, r.replaced, f.dumps)
		}
	})
}

func TestGapCausesDump(t *testing.T) {
	f := newFake(oneTable(80))
	run(t, Options{}, f, func(s *Source, r *recorder) {
		expectPorts(t, r, 80)
		for i, gap := range []func(gen uint32){
			func(gen uint32) { f.events <- commitOf(gen, newRule(1, 99)) },
			func(uint32) { f.events <- batch{err: watch.ErrLost} },
			func(gen uint32) {
				f.events <- commitOf(gen-8, &ruleset.Message{Type: ruleset.MsgDelRule, Table: natrules.Table, Chain: "pre", Handle: 4711})
			},
		} {
			gen := uint32(10 * (i + 1))
			if i == 2 {
				gen = 29
			}
			f.set(oneTable(80, uint16(200+i)), gen, nil)
			gap(gen)
			time.Sleep(time.Second)
			expectPorts(t, r, 80, 200+i)
		}
		if st := s.Status(); st.Lost != 3 || st.Drift != 0 {
			t.Errorf("lost %d, drift %d", st.Lost, st.Drift)
		}
	})
}

func TestErrorsKeepCurrentState(t *testing.T) {
	f := newFake(oneTable(80))
	run(t, Options{}, f, func(_ *Source, r *recorder) {
		expectPorts(t, r, 80)
		f.set(&ruleset.Snapshot{}, 5, errors.New("no memory"))
		f.events <- batch{err: watch.ErrLost}
		time.Sleep(10 * time.Second)
		expectPorts(t, r, 80)
		if r.isStale() == nil {
			t.Error("not stale")
		}
		f.set(oneTable(80, 81), 6, nil)
		time.Sleep(time.Minute)
		expectPorts(t, r, 80, 81)
		if err := r.isStale(); err != nil {
			t.Errorf("still stale: %v", err)
		}
		// A ruleset that changes all the time is reported as stale, too.
		f.set(oneTable(1), 7, watch.ErrMoved)
		f.events <- batch{err: watch.ErrLost}
		time.Sleep(10 * time.Second)
		expectPorts(t, r, 80, 81)
		if !errors.Is(r.isStale(), watch.ErrMoved) {
			t.Errorf("stale: %v", r.isStale())
		}
	})
}

func TestAuditRepairs(t *testing.T) {
	f := newFake(oneTable(80))
	run(t, Options{Audit: 10 * time.Second}, f, func(s *Source, r *recorder) {
		expectPorts(t, r, 80)
		f.set(oneTable(80, 90), 1, nil) // the same generation, another content
		time.Sleep(11 * time.Second)
		expectPorts(t, r, 80, 90)
		if st := s.Status(); st.Drift == 0 {
			t.Error("the drift was not counted")
		}
	})
}

// An audit that takes long delays the next one, unless the interval was given.
func TestAuditIntervalFollowsCost(t *testing.T) {
	for _, c := range []struct {
		o     Options
		takes time.Duration
		most  int // in two hours
		least int
	}{
		{Options{}, time.Millisecond, 25, 23},
		{Options{}, time.Second, 6, 4},
		{Options{Audit: 5 * time.Minute}, time.Second, 25, 23},
	} {
		f := newFake(oneTable(80))
		f.dumpTime = c.takes
		run(t, c.o, f, func(s *Source, r *recorder) {
			time.Sleep(2 * time.Minute)
			before := s.Status().Dumps
			time.Sleep(2 * time.Hour)
			if n := int(s.Status().Dumps - before); n < c.least || n > c.most {
				t.Errorf("%+v: %d dumps in two hours", c, n)
			}
		})
	}
}

func TestNoNftables(t *testing.T) {
	f := newFake(&ruleset.Snapshot{})
	f.dumpErr = watch.ErrAbsent
	f.v4, f.blob = true, natrules.LegacyTable(false)
	run(t, Options{}, f, func(_ *Source, r *recorder) {
		synctest.Wait()
		if r.replaced != 1 || r.isStale() != nil {
			t.Errorf("replaced %d, stale %v", r.replaced, r.isStale())
		}
		// It may come later.
		f.set(oneTable(80), 1, nil)
		time.Sleep(2 * absentPoll)
		expectPorts(t, r, 80)
	})
}

// wakes is a hook that reports as fast as it is read.
type wakes struct{ c chan struct{} }

func (w *wakes) LegacyChanged() <-chan struct{} { return w.c }
func (w *wakes) Method() string                 { return "test" }

// A legacy table that is replaced 1,000 times a second is read as often as a
// tenth of a core allows, and once more after the last time.
func TestLegacyStormIsBounded(t *testing.T) {
	f := newFake(&ruleset.Snapshot{})
	f.v4, f.blob, f.readTime = true, natrules.LegacyTable(false), 5*time.Millisecond
	w := &wakes{}
	run(t, Options{Wake: w}, f, func(s *Source, _ *recorder) {
		before := s.Status().LegacyReads
		const seconds = 10
		for range 1000 * seconds {
			time.Sleep(time.Millisecond)
			select {
			case w.c <- struct{}{}:
			default:
			}
		}
		n := s.Status().LegacyReads - before
		if busy := time.Duration(n) * f.readTime; n < 10 || busy > seconds*time.Second/9 {
			t.Errorf("%d reads take %v of %d s", n, busy, seconds)
		}
		f.mu.Lock()
		last := f.reads
		f.mu.Unlock()
		w.c <- struct{}{}
		time.Sleep(time.Second)
		synctest.Wait()
		if f.readCount() == last {
			t.Error("the last replacement was not read")
		}
		// A hook that breaks gives way to polling.
		close(w.c)
		time.Sleep(10 * time.Second)
		if f.readCount() < last+3 {
			t.Error("no polling after the hook broke")
		}
	})
}

// Endless commits are applied together, within a quarter of a core, and none is
// forgotten.
func TestCommitStorm(t *testing.T) {
	f := newFake(oneTable(80))
	run(t, Options{}, f, func(s *Source, r *recorder) {
		for i := range uint32(2000) {
			f.events <- commitOf(2+i, newRule(uint64(1000+i), uint16(1000+i)))
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		if got := len(r.ports()); got != 2001 || f.dumps != 1 {
			t.Errorf("%d ports, %d dumps", got, f.dumps)
		}
		if st := s.Status(); st.Commits != 2000 {
			t.Errorf("%d commits", st.Commits)
		}
	})
}

func TestOptions(t *testing.T) {
	for _, o := range []Options{{MaxPorts: -1}, {MaxPorts: 70000}, {Audit: time.Millisecond}, {LegacyPoll: time.Microsecond}} {
		if _, err := New(o); err == nil {
			t.Errorf("%+v was accepted", o)
		}
	}
}

// A set that packets meet only since the machine has another address is read before
// anything is stated.
func TestNewAddressLeadsToSetThatWasNotRead(t *testing.T) {
	ruled := func(read bool) *ruleset.Snapshot {
		ports := &ruleset.Set{Name: "ports", KeyLen: 2, Blank: !read, Elements: make(map[string]ruleset.Element)}
		if e := (ruleset.Element{Key: natrules.Port(443)}); read {
			ports.Elements[e.ID()] = e
		}
		s := oneTable(80)
		tb := s.Tables[0]
		tb.Sets = []*ruleset.Set{ports}
		tb.Chains = append(tb.Chains, &ruleset.Chain{Name: "late", Rules: []ruleset.Rule{{Handle: 1, Raw: natrules.Join(
			natrules.TCP(), natrules.Payload(2, 2, 2, 1), natrules.Lookup("ports", 1, -1), natrules.DNAT("10.0.0.1", 80))}}})
		return s
	}
	jump := ruleset.Rule{Handle: 2, Raw: natrules.Join(natrules.Daddr("192.0.2.3"), natrules.Verdict(ruleset.VerdictJump, "late"))}
	f := newFake(ruled(false))
	run(t, Options{}, f, func(_ *Source, r *recorder) {
		expectPorts(t, r, 80)
		now := ruled(true)
		now.Tables[0].Chains[0].Rules = append(now.Tables[0].Chains[0].Rules, jump)
		f.set(now, 2, nil)
		f.events <- commitOf(2, &ruleset.Message{
			Type: ruleset.MsgNewRule, Append: true, Table: natrules.Table, Chain: "pre", Handle: jump.Handle, Raw: jump.Raw})
		expectPorts(t, r, 80)
		if f.dumps != 1 {
			t.Errorf("%d dumps before the address is there, want 1", f.dumps)
		}
		f.give("192.0.2.3/32")
		time.Sleep(time.Second)
		expectPorts(t, r, 80, 443)
		if f.dumps != 2 {
			t.Errorf("%d dumps, want 2", f.dumps)
		}
	})
}

func TestMain(m *testing.M) { leak.Main(m) }

// Messages of commits that were applied are freed, few or many, also those whose slice is
// kept for the next commit.
func TestAppliedMessagesAreFreed(t *testing.T) {
	for _, n := range []int{3, 1000, 20_000} {
		c := newCommits(nil)
		var known []weak.Pointer[ruleset.Message]
		for range 2 {
			msgs := make([]*ruleset.Message, n)
			for i := range msgs {
				msgs[i] = &ruleset.Message{Raw: make([]byte, 64)}
				known = append(known, weak.Make(msgs[i]))
			}
			msgs[n-1].Type = ruleset.MsgNewGen
			if err := c.add(msgs); err != nil || len(c.pending) != n || len(c.partial) != 0 {
				t.Fatalf("%v: %d complete messages of %d, and %d others", err, len(c.pending), n, len(c.partial))
			}
			c.applied()
		}
		runtime.GC()
		left := 0
		for _, m := range known {
			if m.Value() != nil {
				left++
			}
		}
		if left > 0 || cap(c.pending) > 4096 || cap(c.partial) > 4096 {
			t.Errorf("%d of %d messages are kept, and room for %d and %d", left, 2*n, cap(c.pending), cap(c.partial))
		}
		runtime.KeepAlive(c)
	}
}
