// SPDX-License-Identifier: Apache-2.0

//go:build linux

package observer

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	"github.com/fairlead/fairlead/internal/guest/kernel"
	"github.com/fairlead/fairlead/internal/port/schedule"
)

// eventSource is where events come from. All methods but Wait are called by one
// goroutine at a time.
type eventSource interface {
	// Read lends up to limit samples to f and returns how many records it used
	// up; 0 if there is none.
	Read(limit int, f func(sample []byte)) (int, error)
	// Wait blocks until there is something to read, or the source is stopped.
	// With throttle above 0, events of UDP do not end it, but that time does.
	Wait(throttle time.Duration) error
	Position() uint64 // of the next read
	End() uint64      // behind the last record begun
	// Rearm is called after Read while another goroutine is in Wait: the next
	// record wakes that again. It reports whether there is something to read.
	Rearm() bool
	// takeLost reports whether events were lost since it was last called.
	takeLost() bool
	// drops counts the events that were lost so far, and of them those whose
	// hook was skipped.
	drops() (all, skipped uint64)
	// open lets the hooks report the end of sockets that they do not track.
	open(bool)
	track(cookie uint64) error
	untrack(cookie uint64)
	trackable() int
}

// counters are Stats, kept for all goroutines.
type counters struct {
	events, malformed, drops, skipped, resyncs, drift, dumps, dumpFailures atomic.Uint64
	dumpTime, sockets                                                      atomic.Int64
	methods                                                                atomic.Pointer[[]kernel.Method]
}

// engine keeps the model correct and reports to the handler. Two goroutines work in
// it: one reads events, one dumps.
type engine struct {
	handler  Handler
	log      *slog.Logger
	counters *counters
	source   eventSource // nil: everything is polled
	dump     func(context.Context, scope) ([]row, scope, error)
	owners   func(ctx context.Context, sockets []Socket, from uint32) findings // nil: not looked for
	polled   scope                                                             // what has no events
	interval time.Duration
	audit    time.Duration
	paced    bool // audit is the least

	dumpWanted, ownersWanted schedule.Signal

	// holders returns the sockets that their process still has, and its name. If it is
	// nil, nobody looks.
	holders func(ctx context.Context, sockets []Socket) map[uint64]owner
	exits   *exits // nil: nobody tells

	requestMu sync.Mutex
	requested map[uint64]struct{} // by searchOwner

	// mu guards all below, the source but for its Wait, and calls of the handler.
	mu      sync.Mutex
	model   *model
	decoder *decoder
	record  record
	recent  recent
	started time.Time
	read    time.Duration // when the last batch was read, since started
	batch   []Event
	live    bool // the handler has had a Replace
	stale   bool // the last dump failed
	resync  bool // events were lost
	seen    struct{ drops, skipped uint64 }

	tcp, udp  bool                 // what was read since take was called
	budget    *rate.Limiter        // of wake-ups for UDP alone, in milliseconds
	throttled bool                 // UDP is read once each throttleInterval
	renames   map[uint32]Socket    // what the last batch has of processes with another name, by pid
	pending   map[uint64]time.Time // UDP that is not reported yet, and when it was read

	lookAt   time.Time // when sockets whose process is new are looked at; zero if there are none
	lookFrom time.Time // not before, so that looks are paced

	plan      schedule.Deadlines[deadline]
	resolve   scope // what planResolve must dump, to understand events
	checks    int   // how many of checkDelays have passed
	polls     int   // since bound sockets were polled
	audits    int   // since bound sockets were audited
	backoff   schedule.Backoff
	notBefore time.Time     // next dump that events may ask for
	waited    time.Duration // for records without a commit, since a dump began
}

func newEngine(h Handler, log *slog.Logger, c *counters) *engine {
	e := &engine{
		handler:      h,
		log:          log,
		counters:     c,
		dumpWanted:   schedule.NewSignal(),
		ownersWanted: schedule.NewSignal(),
		requested:    make(map[uint64]struct{}),
		model:        newModel(),
		decoder:      newDecoder(),
		started:      time.Now(),
		budget:       rate.NewLimiter(rate.Every(time.Millisecond), int(udpBurst*udpWakeCost/time.Millisecond)),
		renames:      make(map[uint32]Socket),
		pending:      make(map[uint64]time.Time),
		backoff:      schedule.Backoff{Min: retryFirst, Max: retryMost},
	}
	e.model.bound = true // until attached tells
	return e
}

// attached tells that all hooks are attached, before the first dump. Bound says whether
// TCP sockets that do not listen are observed.
func (e *engine) attached(bound bool) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if err := e.drain(); err != nil {
		return err
	}
	if e.model.bound = bound; !bound {
		e.forgetBound()
	}
	for _, en := range e.model.sockets {
		en.tracked = false // the hooks track those that are bound only from here on
	}
	// Binds are seen before what removes a socket without closing it: a connect(2) can
	// have been missed. Their event comes when a dump shows them.
	e.recent.forget(func(cookie uint64) bool {
		en := e.model.sockets[cookie]
		return en != nil && scopeOf(&en.socket) == scopeUDP
	})
	return nil
}

// reportDumped reports changes that did not come by events, in order.
func (e *engine) reportDumped(changes []Event) {
	if len(e.pending) > 0 {
		changes = slices.DeleteFunc(changes, func(change Event) bool { return e.isPending(&change) })
	}
	e.report(changes)
}

func (e *engine) report(changes []Event) {
	if len(changes) == 0 {
		return
	}
	e.counters.sockets.Store(int64(len(e.model.sockets)))
	e.planLook()
	if e.live {
		e.handler.Apply(changes)
	}
}

// lost says that the model may be wrong, and asks for a dump of everything.
func (e *engine) lost(reason string) {
	if e.resync {
		return
	}
	e.resync = true
	e.log.Warn("events lost; dumping sockets again", "reason", reason)
	e.dumpWanted.Notify()
}

// checkDrops notices events that were lost without a sign in the ring.
func (e *engine) checkDrops() {
	if e.source != nil && e.countDrops() {
		e.lost("hooks were skipped")
	}
}

// countDrops reports whether events were lost since it was last called.
func (e *engine) countDrops() bool {
	all, skipped := e.source.drops()
	if all <= e.seen.drops {
		return false
	}
	e.counters.drops.Add(all - e.seen.drops)
	e.counters.skipped.Add(skipped - e.seen.skipped)
	e.seen.drops, e.seen.skipped = all, skipped
	return true
}
