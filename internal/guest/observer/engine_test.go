// SPDX-License-Identifier: Apache-2.0

//go:build linux

package observer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/guest/kernel/bpf"
	"github.com/fairlead/fairlead/internal/port"
)

// rig is an engine at work under a fake clock, with a table that the test edits.
type rig struct {
	*engine
	keeper *keeper
	source *fakeSource

	mu     sync.Mutex
	table  map[uint64]row
	fail   error
	takes  time.Duration // duration of a dump
	scopes []scope       // of the dumps made
}

func tcpRow(cookie uint64) row {
	return row{socket: Socket{
		Cookie: cookie, Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: uint16(1000 + cookie), Listening: true,
		Inode: uint32(cookie),
	}}
}

func udpRow(cookie uint64) row {
	r := tcpRow(cookie)
	r.socket.Protocol = port.UDP
	return r
}

func tcpEvent(kind bpf.SockEventKind, cookie uint64) bpf.SockEvent {
	return bpf.SockEvent{
		Cookie: cookie, Kind: uint8(kind), Protocol: uint8(port.TCP), Family: unix.AF_INET,
		Port: uint16(1000 + cookie), Observed: 1, Pid: 7,
	}
}

func udpEvent(kind bpf.SockEventKind, cookie uint64) bpf.SockEvent {
	e := tcpEvent(kind, cookie)
	e.Protocol = uint8(port.UDP)
	return e
}

// newRig returns an engine that is not yet started.
func newRig(rows ...row) *rig {
	r := &rig{keeper: newKeeper(), source: newFakeSource(), table: make(map[uint64]row), takes: 50 * time.Microsecond}
	r.engine = newTestEngine(r.keeper)
	r.engine.source = r.source
	for _, w := range rows {
		r.table[w.socket.Cookie] = w
	}
	r.dump = func(ctx context.Context, want scope) ([]row, scope, error) {
		r.mu.Lock()
		takes := r.takes
		r.mu.Unlock()
		time.Sleep(takes)
		r.mu.Lock()
		defer r.mu.Unlock()
		r.scopes = append(r.scopes, want)
		if r.fail != nil {
			return nil, 0, r.fail
		}
		var rows []row
		for _, w := range r.table {
			if scopeOf(&w.socket)&want != 0 {
				rows = append(rows, w)
			}
		}
		return rows, want, nil
	}
	return r
}

// edit changes what dumps return.
func (r *rig) edit(f func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	f()
}

// dumped returns the scopes of the dumps since the last call.
func (r *rig) dumped() []scope {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.scopes
	r.scopes = nil
	return s
}

// start runs the engine until the test ends, in a bubble.
func (r *rig) start(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	var workers sync.WaitGroup
	if r.engine.source != nil {
		workers.Go(func() {
			if err := r.readEvents(ctx); err != nil {
				t.Error(err)
			}
		})
	}
	workers.Go(func() {
		if err := r.dumps(ctx); err != nil {
			t.Error(err)
		}
	})
	workers.Go(func() { r.findOwners(ctx) })
	t.Cleanup(func() {
		cancel()
		close(r.source.shut)
		workers.Wait()
	})
}

func (r *rig) wantCalls(t *testing.T, want ...string) {
	t.Helper()
	if got := r.keeper.take(); !slices.Equal(got, want) {
		t.Errorf("calls %q, want %q", got, want)
	}
}

func (r *rig) wantCookies(t *testing.T, want ...uint64) {
	t.Helper()
	if got := r.keeper.cookies(); !slices.Equal(got, want) {
		t.Errorf("cookies %v, want %v", got, want)
	}
}

// inBubble runs a test under a fake clock.
func inBubble(t *testing.T, f func(t *testing.T)) {
	t.Helper()
	synctest.Test(t, f)
}

func TestEventsAfterTheFirstDump(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(tcpRow(1), udpRow(2), tcpRow(3))
		r.source.send(tcpEvent(bpf.SockEventKindEVENT_LISTEN, 3)) // before the first dump
		r.start(t)
		pass(time.Second)
		r.wantCalls(t, "replace 3")
		r.source.send(tcpEvent(bpf.SockEventKindEVENT_LISTEN, 4), tcpEvent(bpf.SockEventKindEVENT_CLOSE, 1))
		synctest.Wait()
		r.wantCalls(t, "put 4", "gone 1")
		r.wantCookies(t, 2, 3, 4)
		if r.keeper.set[3].PID != 7 {
			t.Error("the dump hides the event's process")
		}
	})
}

func TestIdleMakesNoTimer(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(tcpRow(1))
		r.start(t)
		pass(time.Second)
		r.dumped()
		pass(time.Hour)
		if n := len(r.dumped()); n != 59 && n != 60 {
			t.Errorf("%d dumps in an idle hour, want one a minute", n)
		}
		r.keeper.take()
	})
}

func TestFailedDumpKeepsTheSet(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(tcpRow(1))
		r.start(t)
		pass(2 * firstAudit)
		r.keeper.take()
		r.dumped()

		broken := errors.New("no memory")
		r.edit(func() { r.fail = broken })
		pass(r.audit)
		if !errors.Is(r.keeper.stale, broken) {
			t.Errorf("stale: %v, want %v", r.keeper.stale, broken)
		}
		r.wantCookies(t, 1)
		// Events go on.
		r.source.send(tcpEvent(bpf.SockEventKindEVENT_LISTEN, 2))
		synctest.Wait()
		r.wantCookies(t, 1, 2)

		// From 100 ms to 10 s, doubling: not more than one in ten seconds at last.
		pass(10 * time.Minute)
		if n := len(r.dumped()); n < 60 || n > 70 {
			t.Errorf("%d tries in ten minutes, want some sixty", n)
		}
		r.edit(func() { r.fail = nil; r.table[2] = tcpRow(2); delete(r.table, 1) })
		pass(retryMost)
		if r.keeper.stale != nil {
			t.Errorf("still stale: %v", r.keeper.stale)
		}
		r.wantCookies(t, 2)
		if s := r.counters; s.dumpFailures.Load() == 0 || s.drift.Load() != 0 || s.resyncs.Load() != 0 {
			t.Errorf("%d failures, %d drift, %d resyncs", s.dumpFailures.Load(), s.drift.Load(), s.resyncs.Load())
		}
	})
}

func TestFirstDumpFails(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(tcpRow(1))
		r.fail = errors.New("not yet")
		r.start(t)
		pass(time.Second)
		r.source.send(tcpEvent(bpf.SockEventKindEVENT_LISTEN, 2), tcpEvent(bpf.SockEventKindEVENT_LISTEN, 3), tcpEvent(bpf.SockEventKindEVENT_CLOSE, 3))
		synctest.Wait()
		r.wantCookies(t)
		r.edit(func() { r.fail = nil; r.table[2] = tcpRow(2) })
		pass(retryMost)
		r.wantCookies(t, 1, 2)
	})
}

func TestAuditRepairsDrift(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(tcpRow(1), udpRow(2))
		var log strings.Builder
		r.log = slog.New(slog.NewTextHandler(&log, nil))
		r.start(t)
		pass(time.Second)
		r.keeper.take()
		r.edit(func() { delete(r.table, 2); r.table[3] = tcpRow(3) })
		pass(r.audit)
		if want := "tcp 0.0.0.0:1003 listening, cookie 3"; !strings.Contains(log.String(), want) {
			t.Errorf("log %q, want %q", &log, want)
		}
		r.wantCookies(t, 1, 3)
		r.wantCalls(t, "put 3", "gone 2")
		if n := r.counters.drift.Load(); n != 2 {
			t.Errorf("drift %d, want 2", n)
		}
		if r.source.tracked[2] {
			t.Error("a socket that is gone is still tracked")
		}
	})
}

// TestAuditsArePacedByTheirCost: a long audit delays the next one, unless the
// interval was configured. The first one, after a second, is never delayed.
func TestAuditsArePacedByTheirCost(t *testing.T) {
	for _, c := range []struct {
		paced bool
		takes time.Duration
		want  int // audits in 20 minutes after the first
	}{
		{true, 100 * time.Microsecond, 20},
		{true, 10 * time.Millisecond, 4},
		{true, time.Second, 2},
		{false, time.Second, 19},
	} {
		inBubble(t, func(t *testing.T) {
			r := newRig(tcpRow(1))
			r.paced, r.takes = c.paced, c.takes
			r.start(t)
			pass(firstAudit + c.takes/2)
			r.dumped()
			pass(time.Second/2 + c.takes)
			if n := len(r.dumped()); n != 1 {
				t.Errorf("%+v: %d audits after the first second", c, n)
			}
			pass(20 * time.Minute)
			if n := len(r.dumped()); n != c.want && n != c.want-1 {
				t.Errorf("%+v: %d audits in 20 minutes", c, n)
			}
			// A loss without a sign in the ring is found within a minute.
			r.source.mu.Lock()
			r.source.skipped++
			r.source.mu.Unlock()
			resyncs := r.counters.resyncs.Load()
			pass(r.audit + 2*c.takes)
			if n := r.counters.resyncs.Load() - resyncs; n != 1 {
				t.Errorf("%+v: %d dumps for a loss", c, n)
			}
			if all, skipped := r.counters.drops.Load(), r.counters.skipped.Load(); all != 1 || skipped != 1 {
				t.Errorf("%+v: %d losses, %d of them skipped; want 1, 1", c, all, skipped)
			}
			// A loss makes the next audit prompt again.
			r.source.lose()
			pass(firstAudit/2 + c.takes)
			r.dumped()
			pass(firstAudit + c.takes)
			if n := len(r.dumped()); n != 1 {
				t.Errorf("%+v: %d audits just after a loss", c, n)
			}
		})
	}
}

// TestBoundSocketsAreAuditedSeldom: in the audit after the start or a loss, and in each tenth
// after that.
func TestBoundSocketsAreAuditedSeldom(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		bound := tcpRow(2)
		bound.socket.Listening = false
		r := newRig(tcpRow(1), bound)
		r.paced = true
		const cheap = scopeAll &^ scopeTCPBound
		tenth := append(slices.Repeat([]scope{cheap}, boundAudits-1), scopeAll)
		audited := func(when string, audits int, want ...scope) {
			t.Helper()
			r.dumped()
			pass(time.Duration(audits) * r.audit)
			if got := r.dumped(); !slices.Equal(got, want) {
				t.Errorf("%s: audits %v, want %v", when, got, want)
			}
		}
		r.start(t)
		pass(firstAudit / 2)
		r.dumped()
		pass(firstAudit)
		if got := r.dumped(); !slices.Equal(got, []scope{scopeAll}) {
			t.Errorf("first audit %v, want all", got)
		}
		audited("after the start", 2*boundAudits, slices.Concat(tenth, tenth)...)

		r.edit(func() { delete(r.table, 2) })
		audited("half way", boundAudits/2, tenth[:boundAudits/2]...)
		r.wantCookies(t, 1, 2)
		pass(boundAudits / 2 * r.audit)
		r.wantCookies(t, 1)

		audited("half way again", boundAudits/2, tenth[:boundAudits/2]...)
		r.source.lose()
		pass(firstAudit / 2)
		r.dumped()
		pass(firstAudit)
		if got := r.dumped(); !slices.Equal(got, []scope{scopeAll}) {
			t.Errorf("first audit after a loss %v, want all", got)
		}
		audited("after a loss", boundAudits, tenth...)
	})
}

// TestEachAuditThatWasConfiguredHasAll: who sets their interval says how old the state may be.
func TestEachAuditThatWasConfiguredHasAll(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(tcpRow(1))
		r.start(t)
		pass(2 * firstAudit)
		r.dumped()
		pass(3 * r.audit)
		if got := r.dumped(); !slices.Equal(got, slices.Repeat([]scope{scopeAll}, 3)) {
			t.Errorf("audits %v, want three of all", got)
		}
	})
}

// TestBoundSocketsAloneAreAudited: where all else is polled, each audit is of these.
func TestBoundSocketsAloneAreAudited(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(tcpRow(1))
		r.paced, r.polled, r.interval = true, scopeTCPListen|scopeUDP, time.Hour
		r.start(t)
		pass(2 * firstAudit)
		r.dumped()
		pass(3 * r.audit)
		if got := r.dumped(); !slices.Equal(got, slices.Repeat([]scope{scopeTCPBound}, 3)) {
			t.Errorf("audits %v, want three of bound sockets", got)
		}
	})
}

// slowKeeper is a keeper that takes a while for changes. The engine's lock is held
// meanwhile, so no other goroutine of the engine may be woken, or the fake clock stops.
type slowKeeper struct {
	*keeper
	takes atomic.Int64 // nanoseconds
}

func (k *slowKeeper) Apply(events []Event) {
	time.Sleep(time.Duration(k.takes.Load()))
	k.keeper.Apply(events)
}

// TestSlowHandlerDelaysNoDump: what the handler takes is not a cost of the dump whose
// changes it received.
func TestSlowHandlerDelaysNoDump(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		const takes = time.Second
		r := newRig(tcpRow(1))
		slow := &slowKeeper{keeper: r.keeper}
		r.handler, r.paced = slow, true
		r.start(t)
		pass(2 * firstAudit)
		slow.takes.Store(int64(takes))
		r.edit(func() { r.table[2] = tcpRow(2) })
		pass(r.audit + takes)
		r.wantCookies(t, 1, 2)

		r.dumped()
		pass(r.audit)
		if n := len(r.dumped()); n != 1 {
			t.Errorf("%d audits in the minute after one whose changes took the handler %v, want 1", n, takes)
		}

		r.edit(func() { r.table[3] = tcpRow(3) })
		pass(r.audit + takes)
		slow.takes.Store(0)
		r.edit(func() { r.table[4] = tcpRow(4) })
		r.source.lose()
		pass(2 * dumpShare * r.takes)
		r.wantCookies(t, 1, 2, 3, 4)
	})
}

// TestAuditBeforeADumpThatIsAskedFor: what it finds, events did not miss: more of them wait
// for the dump than are kept, or a loss does, which is counted as such.
func TestAuditBeforeADumpThatIsAskedFor(t *testing.T) {
	for name, ask := range map[string]func(*fakeSource){
		"binds without a cookie": func(s *fakeSource) {
			for i := range uint32(maxNoCookie + 1) {
				e := udpEvent(bpf.SockEventKindEVENT_BIND, 0)
				e.Inode = 100 + maxNoCookie - i // the last is not kept
				s.send(e)
			}
		},
		"a loss": (*fakeSource).lose,
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				r := newRig()
				r.takes = firstAudit / 4 // so that the dump is due after the audit
				r.start(t)
				pass(firstAudit)
				r.edit(func() { r.table[100] = udpRow(100) })
				ask(r.source)
				pass(firstAudit)
				r.wantCookies(t, 100)
				if n := r.counters.drift.Load(); n != 0 {
					t.Errorf("drift %d", n)
				}
			})
		})
	}
}

// TestPollsDoNotDelayTheDumpForALoss: polls that take more than their share of the time.
func TestPollsDoNotDelayTheDumpForALoss(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig()
		r.polled, r.audit = scopeUDP, -1
		r.takes = r.interval / 10
		r.start(t)
		pass(time.Minute)
		r.edit(func() { r.table[1] = tcpRow(1) })
		r.source.lose()
		pass(dumpShare * r.takes)
		r.wantCookies(t, 1)
	})
}

func TestNegativeAuditDisablesAudits(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(tcpRow(1))
		r.audit = -1
		r.start(t)
		pass(firstAudit / 2)
		r.edit(func() { r.table[2] = tcpRow(2) })
		pass(firstAudit)
		r.wantCookies(t, 1, 2) // the first dump could have missed it
		r.edit(func() { r.table[3] = tcpRow(3) })
		pass(24 * time.Hour)
		r.wantCookies(t, 1, 2)
	})
}

func TestOneDumpRemovesNothing(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(tcpRow(1), tcpRow(2))
		whole := r.dump
		var miss atomic.Bool
		r.dump = func(ctx context.Context, want scope) ([]row, scope, error) {
			rows, covered, err := whole(ctx, want)
			if miss.Swap(false) {
				rows = slices.DeleteFunc(rows, func(w row) bool { return w.socket.Cookie == 1 })
			}
			return rows, covered, err
		}
		r.start(t)
		pass(time.Second)
		r.keeper.take()
		miss.Store(true)
		pass(r.audit)
		r.wantCalls(t)
		r.wantCookies(t, 1, 2)
	})
}

func TestMalformedEventForcesReplace(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(tcpRow(1))
		r.start(t)
		pass(time.Second)
		r.keeper.take()
		r.source.send(bpf.SockEvent{Kind: 200})
		pass(time.Second)
		r.wantCalls(t, "replace 1")
		if n := r.counters.malformed.Load(); n != 1 {
			t.Errorf("malformed %d, want 1", n)
		}
	})
}

func TestSteadyLossIsPaced(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(tcpRow(1))
		r.takes = 10 * time.Millisecond
		r.start(t)
		pass(time.Second)
		r.dumped()
		for range 1000 {
			r.source.lose()
			pass(10 * time.Millisecond)
		}
		// Ten seconds, of which at most a twentieth is for dumps of 10 ms.
		if n := len(r.dumped()); n > 55 {
			t.Errorf("%d dumps in ten seconds", n)
		}
	})
}

func TestListenerWithoutPort(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig()
		r.start(t)
		pass(2 * firstAudit)
		r.dumped()
		r.keeper.take()
		e := tcpEvent(bpf.SockEventKindEVENT_LISTEN, 5)
		e.Port = 0
		r.edit(func() { r.table[5] = tcpRow(5) })
		r.source.send(e)
		pass(time.Second)
		r.wantCalls(t, "put 5")
		if got := r.keeper.set[5]; got.Port != 1005 || got.PID != 7 {
			t.Errorf("have %+v, want the dump's port and the event's process", got)
		}
		if got := r.dumped(); !slices.Equal(got, []scope{scopeTCPListen}) {
			t.Errorf("dumps %v, want one of listeners only", got)
		}
		// One that failed to listen leaves nothing behind.
		e.Cookie = 6
		r.source.send(e, tcpEvent(bpf.SockEventKindEVENT_CLOSE, 6))
		pass(time.Second)
		r.wantCalls(t)
		if len(r.model.noPort) != 0 {
			t.Errorf("still waiting: %v", r.model.noPort)
		}
	})
}

func TestEventWithoutCookie(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig()
		r.start(t)
		pass(time.Second)
		r.keeper.take()
		e := udpEvent(bpf.SockEventKindEVENT_BIND, 0)
		e.Inode = 5
		client := udpRow(5)
		client.client = true // as the dump shows it
		r.edit(func() { r.table[5] = client })
		r.source.send(e)
		pass(time.Second)
		r.wantCalls(t, "put 5")
		if got := r.keeper.set[5]; got.PID != 7 {
			t.Errorf("have %+v, want the event's process", got)
		}
		if !r.source.tracked[5] {
			t.Error("the end of the socket would not be reported")
		}
	})
}

func TestConnectingSocket(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(udpRow(1), udpRow(2))
		r.start(t)
		pass(2 * firstAudit)
		r.dumped()
		r.keeper.take()
		r.source.send(udpEvent(bpf.SockEventKindEVENT_CHECK, 1), udpEvent(bpf.SockEventKindEVENT_CHECK, 2), udpEvent(bpf.SockEventKindEVENT_CHECK, 77))
		synctest.Wait()
		pass(2 * time.Millisecond)
		r.edit(func() { delete(r.table, 1) }) // took longer than the first check
		pass(time.Second)
		r.wantCalls(t, "gone 1")
		if n := r.counters.drift.Load(); n != 0 {
			t.Errorf("drift %d, want none", n)
		}
		for _, s := range r.dumped() {
			if s != scopeUDP {
				t.Errorf("dump of %b, want UDP only", s)
			}
		}
	})
}

func TestGate(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(udpRow(1), tcpRow(2))
		r.source.limit = 8
		r.start(t)
		pass(time.Second)
		if opened, tracked := r.source.gate(); opened || !tracked[1] || tracked[2] {
			t.Errorf("open %v, tracked %v; want closed, with UDP tracked", opened, tracked)
		}
		r.edit(func() {
			for i := range uint64(20) {
				r.table[100+i] = udpRow(100 + i)
			}
		})
		pass(r.audit)
		if opened, _ := r.source.gate(); !opened {
			t.Error("the gate is closed though not all sockets are tracked")
		}
	})
}

func TestPolling(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(tcpRow(1), udpRow(2))
		bound := tcpRow(3)
		bound.socket.Listening = false
		r.table[3] = bound
		r.engine.source, r.polled = nil, scopeAll
		r.start(t)
		pass(r.interval / 2)
		r.wantCalls(t, "replace 3")
		r.edit(func() { r.table[4] = tcpRow(4); delete(r.table, 1) })
		pass(r.interval)
		r.wantCalls(t, "put 4", "gone 1")
		r.edit(func() { delete(r.table, 3) })
		pass(boundPolls * r.interval)
		r.wantCookies(t, 2, 4)
		r.edit(func() { r.fail = errors.New("broken") })
		pass(r.interval)
		r.wantCookies(t, 2, 4)
		r.edit(func() { r.fail = nil })
		r.keeper.take()
		pass(r.interval)
		r.wantCalls(t, "replace 2")
		if n := r.counters.drift.Load(); n != 0 {
			t.Errorf("drift %d, want none", n)
		}
	})
}

func TestMixedMethods(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(tcpRow(1), udpRow(2))
		r.polled = scopeUDP
		r.start(t)
		pass(2*firstAudit + r.interval/2)
		r.dumped()
		r.keeper.take()
		r.source.send(tcpEvent(bpf.SockEventKindEVENT_LISTEN, 3))
		r.edit(func() { r.table[3] = tcpRow(3); r.table[4] = udpRow(4) })
		synctest.Wait()
		r.wantCalls(t, "put 3")
		pass(r.interval)
		r.wantCalls(t, "put 4")
		if got := r.dumped(); !slices.Equal(got, []scope{scopeUDP}) {
			t.Errorf("dumps %v, want UDP alone", got)
		}
	})
}

// TestCallDuringTheAttach: its hook was not attached yet when the call began.
func TestCallDuringTheAttach(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(tcpRow(1))
		r.start(t)
		pass(firstAudit / 2)
		r.edit(func() { r.table[2] = tcpRow(2) })
		pass(firstAudit)
		r.wantCookies(t, 1, 2)
		// Nor does an event tell what became of a call whose event was lost.
		r.source.lose()
		pass(firstAudit / 2)
		r.edit(func() { delete(r.table, 1) })
		pass(firstAudit)
		r.wantCookies(t, 2)
	})
}

func TestOwnersAreSearchedOnce(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(tcpRow(1), tcpRow(2))
		var asked []string
		r.owners = func(_ context.Context, sockets []Socket, _ uint32) findings {
			var cookies []uint64
			for _, s := range sockets {
				cookies = append(cookies, s.Cookie)
			}
			slices.Sort(cookies)
			asked = append(asked, fmt.Sprint(cookies))
			return findings{owners: map[uint64]owner{1: {pid: 9, comm: "web"}, 99: {pid: 1}}}
		}
		r.start(t)
		pass(time.Second / 2)
		r.wantCalls(t, "replace 2", "put 1", "put 2")
		if got := r.keeper.set[1]; got.PID != 9 || got.Comm != "web" || got.Sought {
			t.Errorf("have %+v", got)
		}
		if got := r.keeper.set[2]; got.PID != 0 || !got.Sought {
			t.Errorf("have %+v, want it sought in vain", got)
		}
		r.source.send(tcpEvent(bpf.SockEventKindEVENT_LISTEN, 3)) // knows its process
		r.edit(func() { r.table[3] = tcpRow(3); r.table[4] = tcpRow(4) })
		pass(r.audit / 2)
		if want := []string{"[1 2]", "[4]"}; !slices.Equal(asked, want) {
			t.Errorf("asked for %v, want %v", asked, want)
		}
	})
}

// TestOwnerThatOneSearchMissed: the process that has the socket was read before it
// got it.
func TestOwnerThatOneSearchMissed(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(tcpRow(1), tcpRow(2))
		r.paced = true
		var mu sync.Mutex // guards both
		searches, found := 0, map[uint64]owner(nil)
		r.owners = func(_ context.Context, sockets []Socket, _ uint32) findings {
			mu.Lock()
			defer mu.Unlock()
			searches += len(sockets)
			return findings{owners: found}
		}
		r.start(t)
		pass(time.Second)
		mu.Lock()
		found = map[uint64]owner{1: {pid: 9, comm: "web"}}
		mu.Unlock()
		pass(10 * r.audit)
		mu.Lock()
		defer mu.Unlock()
		if got := r.keeper.set[1]; got.PID != 9 || got.Comm != "web" {
			t.Errorf("have %+v", got)
		}
		if want := 2 + 2 + 1; searches != want {
			t.Errorf("searched for %d owners, want %d", searches, want)
		}
	})
}

// Nobody asks who has a socket, and rules decide by that: it is looked at when its process
// is new, gets a name or ends, after a loss, and at each audit. If nobody has it, it has no owner.
func TestOwnersAreLookedAt(t *testing.T) {
	const passed, lost, same = 1, 2, 3
	for _, c := range []struct {
		name   string
		sooner bool // while its process is new
		by     func(*rig) error
		polled scope
		within time.Duration
	}{
		{name: "new", sooner: true, within: ownerSettle},
		{name: "audit", within: time.Minute},
		{name: "end", by: func(r *rig) error { return r.exited([]uint32{7}) }, within: ownerPause / 2},
		{name: "end, polled", by: func(r *rig) error { return r.exited([]uint32{7}) }, polled: scopeTCPListen, within: ownerSettle},
		{name: "name", by: func(r *rig) error {
			e := bpf.SockEvent{Kind: uint8(bpf.SockEventKindEVENT_RENAME), Protocol: uint8(port.TCP), Observed: 2, Pid: 7}
			copy(e.Comm[:], "is")
			r.source.send(e)
			pass(time.Millisecond)
			if got := r.keeper.get(same); got.Comm != "is" {
				return fmt.Errorf("not named at once: %+v", got)
			}
			return nil
		}, within: ownerSettle},
		{name: "loss", by: func(r *rig) error { r.source.lose(); return nil }, within: ownerSettle + ownerPause},
	} {
		t.Run(c.name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				r := newRig()
				r.polled = c.polled
				comm, handed := "was", false
				now := func(ctx context.Context, sockets []Socket) map[uint64]owner {
					have := make(map[uint64]owner)
					r.edit(func() {
						for _, s := range sockets {
							if !handed || s.Cookie == same {
								have[s.Cookie] = owner{pid: 7, comm: comm}
							}
						}
					})
					return have
				}
				r.holders = now
				r.owners = func(ctx context.Context, sockets []Socket, _ uint32) findings {
					found := now(ctx, sockets)
					r.edit(func() {
						if handed {
							found[passed] = owner{pid: 9, comm: "web"}
						}
					})
					return findings{owners: found}
				}
				r.start(t)
				pass(time.Second)
				for cookie := range uint64(same) {
					e := tcpEvent(bpf.SockEventKindEVENT_LISTEN, 1+cookie)
					copy(e.Comm[:], "was")
					r.source.send(e)
					r.edit(func() { r.table[1+cookie] = tcpRow(1 + cookie) })
				}
				pass(time.Millisecond)
				if !c.sooner {
					pass(ownerSettle)
				}
				r.edit(func() { comm, handed = "is", true })
				if c.by != nil {
					if err := c.by(r); err != nil {
						t.Error(err)
					}
				}
				pass(c.within)
				if got := r.keeper.get(passed); got.PID != 9 || got.Comm != "web" {
					t.Errorf("passed on: %+v", got)
				}
				if got := r.keeper.get(lost); got.PID != 0 || got.Comm != "" || !got.Sought {
					t.Errorf("held by nobody: %+v", got)
				}
				if got := r.keeper.get(same); got.PID != 7 || got.Comm != "is" {
					t.Errorf("named anew: %+v", got)
				}
			})
		})
	}
}

// TestOwnersByAudit: each tenth audit searches all of /proc, and the oldest process counts,
// also where the search takes several parts.
func TestOwnersByAudit(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig()
		r.paced = true
		var searches atomic.Int32
		older := false
		r.holders = holdAll
		r.owners = func(_ context.Context, _ []Socket, from uint32) (f findings) {
			r.edit(func() {
				f.owners = map[uint64]owner{1: {pid: 8, started: 3}}
				switch from {
				case 0:
					searches.Add(1)
					f = findings{next: 50, owners: map[uint64]owner{1: {pid: 7, started: 2}}}
				case 50:
					if f.next = 90; older {
						f.owners[1] = owner{pid: 60, started: 1}
					}
				}
			})
			return f
		}
		r.start(t)
		pass(time.Second)
		r.source.send(tcpEvent(bpf.SockEventKindEVENT_LISTEN, 1))
		r.edit(func() { r.table[1] = tcpRow(1) })
		pass(9 * r.audit)
		if got := r.keeper.get(1); got.PID != 7 || searches.Load() != 1 {
			t.Errorf("have %+v after %d searches", got, searches.Load())
		}
		r.edit(func() { older = true })
		pass(2*r.audit + 10*ownerPause)
		if got := r.keeper.get(1); got.PID != 60 || searches.Load() != 2 {
			t.Errorf("have %+v after %d searches", got, searches.Load())
		}
	})
}

// A process listens on the socket that another one bound and has still.
func TestListenerOfAnotherProcess(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig()
		r.audit, r.holders = -1, holdAll
		var searches atomic.Int32
		r.owners = func(context.Context, []Socket, uint32) findings {
			searches.Add(1)
			return findings{owners: map[uint64]owner{1: {pid: 7}}}
		}
		r.start(t)
		pass(time.Second)
		e := tcpEvent(bpf.SockEventKindEVENT_BIND, 1)
		r.source.send(e)
		pass(10 * time.Second)
		e.Kind, e.Pid = uint8(bpf.SockEventKindEVENT_LISTEN), 8
		r.source.send(e)
		pass(ownerSettle / 2)
		if got := r.keeper.get(1); got.PID != 8 || searches.Load() != 0 {
			t.Errorf("have %+v after %d searches", got, searches.Load())
		}
		pass(10 * time.Second)
		if got := r.keeper.get(1); got.PID != 7 || searches.Load() != 1 {
			t.Errorf("have %+v after %d searches", got, searches.Load())
		}
	})
}

// Each socket has its own time to be handed on, whatever else is looked at meanwhile.
func TestEachSocketIsLookedAtWhenItHasSettled(t *testing.T) {
	for _, c := range []struct {
		name  string
		audit time.Duration // after the start; the socket is bound just before
		other bool          // another socket is looked at just after
	}{
		{name: "audit", audit: 10 * time.Second},
		{name: "another socket", audit: -1, other: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				const shortly = 50 * time.Millisecond
				r := newRig()
				r.audit = c.audit
				handed := false
				r.holders = func(_ context.Context, sockets []Socket) map[uint64]owner {
					have := make(map[uint64]owner)
					r.edit(func() {
						for _, s := range sockets {
							if s.Cookie != 2 || !handed {
								have[s.Cookie] = owner{pid: s.PID, comm: s.Comm}
							}
						}
					})
					return have
				}
				r.owners = func(context.Context, []Socket, uint32) findings {
					return findings{owners: map[uint64]owner{2: {pid: 9, comm: "web"}}}
				}
				r.start(t)
				if pass(10*time.Second - ownerSettle); c.other {
					r.source.send(tcpEvent(bpf.SockEventKindEVENT_LISTEN, 1))
				}
				pass(ownerSettle - shortly)
				r.source.send(tcpEvent(bpf.SockEventKindEVENT_LISTEN, 2))
				r.edit(func() { r.table[1], r.table[2] = tcpRow(1), tcpRow(2) })
				pass(2 * shortly)
				r.edit(func() { handed = true })
				pass(ownerSettle + ownerPause)
				if got := r.keeper.get(2); got.PID != 9 {
					t.Errorf("handed on: %+v", got)
				}
			})
		})
	}
}

// holdAll is where each process still has its sockets.
func holdAll(_ context.Context, sockets []Socket) map[uint64]owner {
	have := make(map[uint64]owner)
	for _, s := range sockets {
		have[s.Cookie] = owner{pid: s.PID, comm: s.Comm}
	}
	return have
}

// A process with many descriptors that opens a socket each second is not read each second.
func TestLooksArePaced(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig()
		r.audit = -1
		r.owners = func(context.Context, []Socket, uint32) findings { return findings{} }
		looks := 0
		r.holders = func(ctx context.Context, sockets []Socket) map[uint64]owner {
			r.edit(func() { looks++ })
			for start := threadTime(); threadTime()-start < 200*time.Millisecond; {
				continue
			}
			return holdAll(ctx, sockets)
		}
		r.start(t)
		for cookie := range uint64(8) {
			r.source.send(tcpEvent(bpf.SockEventKindEVENT_LISTEN, 1+cookie))
			pass(time.Second)
		}
		r.edit(func() {
			if looks < 1 || looks > 3 {
				t.Errorf("%d looks in eight seconds, of 0.2 seconds each", looks)
			}
		})
	})
}

// Without audits, too, what watches a process goes with its last socket.
func TestOnlyProcessesWithSocketsAreWatched(t *testing.T) {
	x, err := openExits()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = x.close() }()
	inBubble(t, func(t *testing.T) {
		r := newRig()
		r.audit, r.exits = -1, x
		r.owners = func(context.Context, []Socket, uint32) findings { return findings{} }
		r.holders = holdAll
		r.start(t)
		pids := []uint32{uint32(os.Getpid()), uint32(os.Getppid())}
		for i, pid := range pids {
			e := tcpEvent(bpf.SockEventKindEVENT_LISTEN, uint64(1+i))
			e.Pid = pid
			r.source.send(e)
			pass(ownerSettle + ownerPause)
			r.source.send(tcpEvent(bpf.SockEventKindEVENT_CLOSE, uint64(1+i)))
			pass(time.Second)
		}
		x.mu.Lock()
		defer x.mu.Unlock()
		if _, ok := x.fds[pids[1]]; !ok || len(x.fds) != 1 {
			t.Errorf("watches %v, want %d alone", slices.Collect(maps.Keys(x.fds)), pids[1])
		}
	})
}

// Most sockets end with their process, and nobody is searched for.
func TestOwnerEndsWithItsSockets(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig()
		r.owners = func(_ context.Context, sockets []Socket, _ uint32) findings {
			t.Errorf("searched for %d owners", len(sockets))
			return findings{}
		}
		r.start(t)
		pass(time.Second)
		r.source.send(tcpEvent(bpf.SockEventKindEVENT_LISTEN, 1))
		pass(time.Second)
		r.source.send(tcpEvent(bpf.SockEventKindEVENT_CLOSE, 1))
		if err := r.exited([]uint32{7}); err != nil {
			t.Error(err)
		}
		pass(time.Second)
	})
}

// A search that uses up its budget goes on where it ended, and nobody is given up before.
func TestSearchForOwnersGoesOn(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(tcpRow(1), tcpRow(2))
		var from []uint32
		r.owners = func(_ context.Context, _ []Socket, pid uint32) findings {
			switch from = append(from, pid); pid {
			case 0:
				return findings{next: 50}
			case 50:
				return findings{next: 90, owners: map[uint64]owner{1: {pid: 60, comm: "web"}}}
			}
			return findings{}
		}
		r.start(t)
		pass(ownerPause / 2)
		if got := r.keeper.get(2); got.Sought {
			t.Errorf("have %+v after a part of /proc", got)
		}
		pass(3 * ownerPause)
		if first, second := r.keeper.get(1), r.keeper.get(2); first.PID != 60 || first.Sought || !second.Sought {
			t.Errorf("have %+v and %+v", first, second)
		}
		if want := []uint32{0, 50, 90}; !slices.Equal(from, want) {
			t.Errorf("searched from %v, want %v", from, want)
		}
	})
}

// Where processes cannot be read, rules do not wait for ever.
func TestSearchesForOwnersThatAreDenied(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(tcpRow(1))
		var searches atomic.Int32
		r.owners = func(context.Context, []Socket, uint32) findings {
			searches.Add(1)
			return findings{denied: true}
		}
		r.start(t)
		pass(ownerPause * 3 / 2)
		if got := r.keeper.get(1); got.Sought || searches.Load() != 2 {
			t.Errorf("have %+v after %d searches", got, searches.Load())
		}
		pass(10 * ownerPause)
		if got := r.keeper.get(1); !got.Sought || searches.Load() != maxSearches {
			t.Errorf("have %+v after %d searches", got, searches.Load())
		}
	})
}

// The process that made a socket is known, and somebody needs the one that holds it.
func TestOwnerIsSearchedOnRequest(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig()
		found := map[uint64]owner{1: {pid: 9, comm: "web"}}
		r.owners = func(context.Context, []Socket, uint32) findings { return findings{owners: found} }
		r.start(t)
		pass(time.Second)
		r.source.send(tcpEvent(bpf.SockEventKindEVENT_LISTEN, 1), tcpEvent(bpf.SockEventKindEVENT_LISTEN, 2))
		pass(time.Second)
		for cookie := range uint64(4) {
			r.searchOwner(cookie)
		}
		pass(time.Second)
		if first, second := r.keeper.set[1], r.keeper.set[2]; first.PID != 9 || first.Sought || second.PID != 0 || !second.Sought {
			t.Errorf("have %+v and %+v", first, second)
		}
		// The search has it again: who asked need not wait.
		r.searchOwner(1)
		pass(2 * time.Second)
		if got := r.keeper.get(1); got.PID != 9 || !got.Sought {
			t.Errorf("searched for again: %+v", got)
		}
	})
}

// TestBusyReaderPauses: a burst of events is read in batches, and the last of it soon.
func TestBusyReaderPauses(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig()
		r.start(t)
		pass(time.Second)
		r.keeper.take()
		begin, before := time.Now(), r.source.found()
		for i := range uint64(1000) {
			r.source.send(tcpEvent(bpf.SockEventKindEVENT_LISTEN, 1+i))
			pass(10 * time.Microsecond)
		}
		pass(4 * time.Millisecond)
		if n := len(r.keeper.cookies()); n != 1000 {
			t.Errorf("%d of 1000 seen %v after the first", n, time.Since(begin))
		}
		if n := r.source.found() - before; n > 20 {
			t.Errorf("%d reads", n)
		}
	})
}

// TestSustainedEventsAreReadInBatches: each is seen within the longest pause, what does not
// live as long is not reported, and the first event after quiet waits for nothing.
func TestSustainedEventsAreReadInBatches(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig()
		r.start(t)
		pass(time.Second)
		next := uint64(0)
		load := func(lasts time.Duration) {
			for end := time.Now().Add(lasts); time.Now().Before(end); pass(time.Millisecond) {
				for range 5 {
					next++
					r.source.send(tcpEvent(bpf.SockEventKindEVENT_LISTEN, next), tcpEvent(bpf.SockEventKindEVENT_CLOSE, next))
				}
			}
		}
		load(100 * time.Millisecond)
		before := r.source.found()
		load(time.Second)
		if n := r.source.found() - before; n > 45 {
			t.Errorf("%d reads in a second, want one each %v", n, longestPause)
		}
		r.source.send(tcpEvent(bpf.SockEventKindEVENT_LISTEN, 1_000_000))
		load(longestPause + time.Millisecond)
		r.wantCookies(t, 1_000_000)

		// Hooks that were skipped are noticed before it is quiet.
		r.dumped()
		r.edit(func() { r.table[1_000_000] = tcpRow(1_000_000) })
		r.source.mu.Lock()
		r.source.skipped++
		r.source.mu.Unlock()
		load(time.Second)
		if got := r.dumped(); !slices.Contains(got, scopeAll) {
			t.Errorf("dumps %v after a hook was skipped under load", got)
		}

		pass(2 * longestPause)
		r.source.send(tcpEvent(bpf.SockEventKindEVENT_LISTEN, 1_000_001))
		synctest.Wait()
		r.wantCookies(t, 1_000_000, 1_000_001)
	})
}

// TestEndUnderLoad: a reader that always finds something ends with its context.
func TestEndUnderLoad(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig()
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		ended := make(chan error, 1)
		go func() { ended <- r.readEvents(ctx) }()
		for i := range uint64(1000) {
			if i == 500 {
				cancel()
			}
			r.source.send(tcpEvent(bpf.SockEventKindEVENT_LISTEN, 1+i))
			pass(100 * time.Microsecond)
		}
		select {
		case err := <-ended:
			if err != nil {
				t.Error(err)
			}
		default:
			close(r.source.shut)
			t.Errorf("it reads on without its context; then error %v", <-ended)
		}
	})
}

func TestPacer(t *testing.T) {
	for _, c := range []struct {
		last time.Duration
		n    int
		want time.Duration
	}{
		{0, batchLimit, burstPause},
		{burstPause, 1, 2 * burstPause},
		{2 * burstPause, 1, burstPause}, // too few to wait for
		{longestPause, 20, burstPause},
		{20 * time.Millisecond, 100, longestPause},
		{longestPause, 100, longestPause},
		{10 * time.Millisecond, 400, 10 * time.Millisecond},
		{10 * time.Millisecond, batchLimit - 1, 5 * time.Millisecond},
		{10 * time.Millisecond, batchLimit, burstPause}, // there are more
		{burstPause, batchLimit, burstPause},
	} {
		p := pacer{burst: true, pause: c.last}
		if got := p.read(c.n); got != c.want {
			t.Errorf("%d records after a pause of %v: the next is %v, want %v", c.n, c.last, got, c.want)
		}
	}
}

// TestFewEventsAreNoBurst: a program that opens some ports waits for nothing, and nothing
// wakes the reader later for it.
func TestFewEventsAreNoBurst(t *testing.T) {
	var p pacer
	now := time.Now()
	for i := range 50 {
		now = now.Add(10 * time.Millisecond)
		for range 6 {
			now = now.Add(20 * time.Microsecond)
			p.woke(now)
			if pause := p.read(1); pause != 0 {
				t.Fatalf("a pause of %v at event %d", pause, i)
			}
		}
	}
}

// TestFewReadsAreNoBurst: the ports that a program opens one after the other are read at once,
// also where each is there only after the one before was read.
func TestFewReadsAreNoBurst(t *testing.T) {
	var p pacer
	p.woke(time.Now())
	for i, n := range []int{2, 2, 3} {
		if pause := p.read(n); pause != 0 {
			t.Errorf("a pause of %v after read %d", pause, i)
		}
	}
	if pause := p.read(1); pause != burstPause {
		t.Errorf("a pause of %v after 8 records, want %v", pause, burstPause)
	}
}

// pass lets time go by and waits until everything is idle again.
func pass(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

// TestEndlessUDPIsThrottled: UDP that comes and goes without end is read in batches,
// and TCP does not wait for it.
func TestEndlessUDPIsThrottled(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig()
		r.start(t)
		time.Sleep(time.Second)
		churn := func(n int) (reads int) {
			r.source.mu.Lock()
			before := r.source.waits
			r.source.mu.Unlock()
			for range n {
				r.source.send(udpEvent(bpf.SockEventKindEVENT_BIND, 1), udpEvent(bpf.SockEventKindEVENT_CLOSE, 1))
				time.Sleep(5 * time.Millisecond)
			}
			r.source.mu.Lock()
			defer r.source.mu.Unlock()
			return r.source.waits - before
		}
		if n := churn(25); n < 24 {
			t.Errorf("%d reads for the first 25 events, want one for each", n)
		}
		churn(1000)
		if n := churn(2000); n > 120 {
			t.Errorf("%d reads in ten seconds, want some 100", n)
		}
		r.source.send(tcpEvent(bpf.SockEventKindEVENT_LISTEN, 2))
		synctest.Wait()
		r.wantCookies(t, 2)
		r.source.send(udpEvent(bpf.SockEventKindEVENT_BIND, 3))
		time.Sleep(2*throttleInterval + time.Millisecond)
		r.wantCookies(t, 2, 3)
		// A quiet second restores the budget.
		time.Sleep(2 * time.Second)
		r.source.send(udpEvent(bpf.SockEventKindEVENT_BIND, 4))
		synctest.Wait()
		r.wantCookies(t, 2, 3, 4)
	})
}

// TestThrottledUDPReportsOnlyWhatStays: while UDP is throttled, only sockets that
// stay are reported, in their latest state, and so is their end.
func TestThrottledUDPReportsOnlyWhatStays(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig()
		r.start(t)
		next := uint64(100)
		churn := func() { // a second of sockets that live 15 ms
			for range 100 {
				next++
				r.source.send(udpEvent(bpf.SockEventKindEVENT_BIND, next))
				time.Sleep(10 * time.Millisecond)
				r.source.send(udpEvent(bpf.SockEventKindEVENT_CLOSE, next-1))
			}
		}
		for range 10 {
			churn()
		}
		r.keeper.take()
		churn()
		r.wantCalls(t)

		stays, changes := udpEvent(bpf.SockEventKindEVENT_BIND, 3), udpEvent(bpf.SockEventKindEVENT_BIND, 4)
		r.source.send(stays, changes)
		changes.Port++
		r.source.send(changes)
		time.Sleep(2*throttleInterval + time.Millisecond)
		synctest.Wait()
		if s := r.keeper.set[4]; s.Port != changes.Port {
			t.Errorf("have %+v, want port %d", s, changes.Port)
		}
		r.source.send(udpEvent(bpf.SockEventKindEVENT_CLOSE, 3), udpEvent(bpf.SockEventKindEVENT_CONNECT, 4), udpEvent(bpf.SockEventKindEVENT_CLOSE, next))
		churn()
		r.source.send(udpEvent(bpf.SockEventKindEVENT_CLOSE, next))
		time.Sleep(time.Minute)
		r.wantCookies(t)
		r.source.send(udpEvent(bpf.SockEventKindEVENT_BIND, 5))
		synctest.Wait()
		r.wantCookies(t, 5)
	})
}

// TestDumpWhileUDPIsThrottled: pending sockets are reported by a dump if they exist,
// and forgotten if not.
func TestDumpWhileUDPIsThrottled(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig()
		r.start(t)
		time.Sleep(time.Second)
		for range 500 {
			r.source.send(udpEvent(bpf.SockEventKindEVENT_BIND, 1), udpEvent(bpf.SockEventKindEVENT_CLOSE, 1))
			time.Sleep(5 * time.Millisecond)
		}
		r.keeper.take()
		// Two come; the end of one is lost.
		r.source.send(udpEvent(bpf.SockEventKindEVENT_BIND, 2), udpEvent(bpf.SockEventKindEVENT_BIND, 3))
		r.edit(func() { r.table[2] = udpRow(2) })
		time.Sleep(throttleInterval)
		r.source.lose()
		r.source.send(tcpEvent(bpf.SockEventKindEVENT_LISTEN, 4))
		r.edit(func() { r.table[4] = tcpRow(4) })
		synctest.Wait()
		time.Sleep(time.Second)
		r.wantCookies(t, 2, 4)
		r.source.send(udpEvent(bpf.SockEventKindEVENT_CLOSE, 2))
		time.Sleep(time.Second)
		r.wantCookies(t, 4)
	})
}
