// SPDX-License-Identifier: Apache-2.0

// Package reconcile is the only loop that drives sinks: it turns the merged
// table into the wanted set (rules obeyed, what vanished held for a moment) and
// keeps each sink equal to it, with retries, on a worker of its own.
package reconcile

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/table"
)

// Options configures a Reconciler.
type Options struct {
	// HoldDown is how long a publication whose last origin went is still
	// wanted, so that an atomic rebuild or a restart cuts no client. 0 is allowed.
	HoldDown time.Duration
	// Ready, if not nil, is closed when the publications are complete. Until then,
	// or for ReadyTimeout (3 s if 0), no sink is synced: a set that lacks what was
	// not yet seen would close ports that are still wanted.
	Ready        <-chan struct{}
	ReadyTimeout time.Duration
	// SyncTimeout bounds one Sync; 5 s if 0.
	SyncTimeout time.Duration
	// RetryMin and RetryMax bound the pause after a failed Sync, which doubles
	// each time; 100 ms and 5 s if 0.
	RetryMin, RetryMax time.Duration
	// Denied, if not nil, is told the keys that a rule forbade while they were
	// wanted, so that their flows can be cut.
	Denied func([]port.Key)
	// Synced, if not nil, is told each publication that a sink made active.
	Synced func(sink string, p port.Publication)
	Logger *slog.Logger
	Now    func() time.Time // time.Now if nil
}

// SinkOutcome is an outcome with the sink that said it.
type SinkOutcome struct {
	Sink string
	port.Outcome
}

// Outcomes is what all sinks said of one publication, sorted by sink and host address.
type Outcomes []SinkOutcome

// Reconciler keeps sinks equal to a table of publications.
type Reconciler struct {
	o        Options
	log      *slog.Logger
	from     *table.Table[port.Key, port.Publication]
	sinks    []Sink
	wanted   *table.Table[port.Key, port.Publication]
	outcomes *table.Table[port.Key, Outcomes]
	counters []counters // of each of sinks

	first   chan struct{} // closed when every sink was in sync once
	waiting atomic.Int32  // sinks that were not
}

// counters are what Stats reads.
type counters struct{ syncs, failures, retries atomic.Uint64 }

// SinkStats counts what was asked of one sink since the start.
type SinkStats struct {
	Sink     string
	Syncs    uint64 // calls of Sync that succeeded
	Failures uint64 // calls of Sync that failed
	Retries  uint64 // calls of Sync for no other reason than a failure before
}

// Stats returns the counts of each sink, in the order of the sinks.
func (r *Reconciler) Stats() []SinkStats {
	stats := make([]SinkStats, len(r.sinks))
	for i, s := range r.sinks {
		c := &r.counters[i]
		stats[i] = SinkStats{s.Name(), c.syncs.Load(), c.failures.Load(), c.retries.Load()}
	}
	return stats
}

// New returns a reconciler of the publications in from. It starts nothing.
func New(from *table.Table[port.Key, port.Publication], sinks []Sink, o Options) *Reconciler {
	if o.SyncTimeout == 0 {
		o.SyncTimeout = 5 * time.Second
	}
	if o.ReadyTimeout == 0 {
		o.ReadyTimeout = 3 * time.Second
	}
	if o.RetryMin == 0 {
		o.RetryMin = 100 * time.Millisecond
	}
	if o.RetryMax == 0 {
		o.RetryMax = 5 * time.Second
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	r := &Reconciler{
		o: o, log: o.Logger, from: from, sinks: sinks,
		wanted:   table.New[port.Key, port.Publication](port.Key.Compare),
		outcomes: table.New[port.Key, Outcomes](port.Key.Compare),
		first:    make(chan struct{}),
		counters: make([]counters, len(sinks)),
	}
	r.waiting.Store(int32(len(sinks)))
	if len(sinks) == 0 {
		close(r.first)
	}
	return r
}

// FirstSync is closed once every sink was equal to the wanted set for the first time.
func (r *Reconciler) FirstSync() <-chan struct{} { return r.first }

// Wanted is the set that the sinks are kept equal to. Only the reconciler writes it.
func (r *Reconciler) Wanted() *table.Table[port.Key, port.Publication] { return r.wanted }

// Outcomes is what the sinks said, by publication. Only the reconciler writes it.
func (r *Reconciler) Outcomes() *table.Table[port.Key, Outcomes] { return r.outcomes }

// Run drives the sinks until ctx ends.
func (r *Reconciler) Run(ctx context.Context) error {
	if err := r.awaitReady(ctx); err != nil {
		return err
	}
	sub := r.from.Subscribe()
	defer sub.Close()
	h := holds{due: make(map[port.Key]time.Time), pending: make(map[port.Key]struct{})}
	// What stands is wanted before the first sink is synced.
	view, change := sub.Take()
	r.apply(view, change, &h)
	var wg sync.WaitGroup
	defer wg.Wait()
	for i, s := range r.sinks {
		wg.Go(func() { r.drive(ctx, s, &r.counters[i]) })
	}
	return r.want(ctx, sub, &h)
}

func (r *Reconciler) awaitReady(ctx context.Context) error {
	if r.o.Ready == nil {
		return nil
	}
	timeout := time.NewTimer(r.o.ReadyTimeout)
	defer timeout.Stop()
	select {
	case <-r.o.Ready:
	case <-timeout.C:
		r.log.Warn("not all sources have said what there is; going on without them", "waited", r.o.ReadyTimeout)
	case <-ctx.Done():
		return ctx.Err()
	}
	return nil
}

// want keeps the wanted set: what is allowed, and for the hold-down what was.
func (r *Reconciler) want(ctx context.Context, sub *table.Subscription[port.Key, port.Publication], h *holds) error {
	timer := time.NewTimer(time.Hour)
	timer.Stop()
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-sub.C():
			view, change := sub.Take()
			r.apply(view, change, h)
		case <-timer.C:
			r.expire(h)
		}
		if at, ok := h.next(); ok {
			timer.Reset(at.Sub(r.o.Now()))
		} else {
			timer.Stop()
		}
	}
}

func (r *Reconciler) apply(view View, change Change, h *holds) {
	var denied []port.Key
	r.wanted.Update(func(tx *table.Tx[port.Key, port.Publication]) {
		for _, k := range change.Keys {
			p, there := view.Get(k)
			old, wanted := tx.Get(k)
			switch {
			case there && p.Decision.Allow:
				delete(h.due, k)
				delete(h.pending, k)
				if !wanted || !old.Equal(p) {
					tx.Share(view, k)
				}
			case there && p.Decision.Pending: // it may turn out to be forbidden: at once
				delete(h.due, k)
				if wanted {
					h.pending[k] = struct{}{}
				}
				tx.Delete(k)
			case there && !p.Decision.Withheld: // a rule forbids it: at once
				delete(h.due, k)
				if _, was := h.pending[k]; wanted || was {
					denied = append(denied, k)
				}
				delete(h.pending, k)
				tx.Delete(k)
			case !there && !wanted:
				delete(h.pending, k)
			case wanted && r.o.HoldDown > 0 && !replaced(view, old):
				h.add(k, r.o.Now().Add(r.o.HoldDown))
			default:
				tx.Delete(k)
			}
		}
	})
	if len(denied) > 0 && r.o.Denied != nil {
		r.o.Denied(denied)
	}
}

// replaced reports whether another publication took over all host addresses of
// p, as when the second half of a dual-stack pair comes or goes: to hold p
// would only stand in its way.
func replaced(view View, p port.Publication) bool {
	for _, a := range []netip.Addr{netip.IPv4Unspecified(), netip.IPv6Unspecified()} {
		q, ok := view.Get(port.Key{Protocol: p.Protocol, Address: a, Port: p.Port})
		if ok && q.Decision.Allow && !slices.ContainsFunc(p.Decision.Host, func(h netip.AddrPort) bool {
			return !slices.Contains(q.Decision.Host, h)
		}) {
			return true
		}
	}
	return false
}

func (r *Reconciler) expire(h *holds) {
	now := r.o.Now()
	r.wanted.Update(func(tx *table.Tx[port.Key, port.Publication]) {
		for _, k := range h.expired(now) {
			tx.Delete(k)
		}
	})
}

// holds is the keys that are held, and when each ends. As all are held equally
// long, the order of arrival is the order of the ends.
type holds struct {
	due   map[port.Key]time.Time
	queue []held

	// pending were wanted until their owner became uncertain. Their flows go on,
	// and are reset if a rule forbids the port in the end.
	pending map[port.Key]struct{}
}

type held struct {
	key port.Key
	at  time.Time
}

func (h *holds) add(k port.Key, at time.Time) {
	if _, ok := h.due[k]; ok {
		return
	}
	h.due[k] = at
	h.queue = append(h.queue, held{k, at})
}

// skim drops the ends of holds that were taken back.
func (h *holds) skim() {
	for len(h.queue) > 0 && h.due[h.queue[0].key] != h.queue[0].at {
		h.queue = h.queue[1:]
	}
}

func (h *holds) next() (time.Time, bool) {
	h.skim()
	if len(h.queue) == 0 {
		return time.Time{}, false
	}
	return h.queue[0].at, true
}

func (h *holds) expired(now time.Time) (keys []port.Key) {
	for h.skim(); len(h.queue) > 0 && !h.queue[0].at.After(now); h.skim() {
		k := h.queue[0].key
		delete(h.due, k)
		keys = append(keys, k)
	}
	return keys
}

// drive keeps one sink equal to the wanted set.
func (r *Reconciler) drive(ctx context.Context, s Sink, count *counters) {
	w := worker{r: r, sink: s, count: count, log: r.log.With("sink", s.Name()), pause: r.o.RetryMin}
	sub := r.wanted.Subscribe()
	defer sub.Close()
	retry := time.NewTimer(time.Hour)
	retry.Stop()
	defer retry.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-sub.C():
		case <-s.Wake():
		case <-retry.C:
			count.retries.Add(1)
		}
		view, change := sub.Take()
		if again := w.sync(ctx, view, change); again > 0 {
			retry.Reset(again)
		} else {
			retry.Stop()
		}
	}
}

// worker is the state of one sink's loop.
type worker struct {
	r     *Reconciler
	sink  Sink
	count *counters
	log   *slog.Logger
	pause time.Duration
	bad   bool
	once  bool // it was in sync

	synced uint64     // generation of the last Sync that succeeded
	keys   []port.Key // changed since then, each once
}

// sync runs one Sync and returns when to try again, 0 for not before something changes.
func (w *worker) sync(ctx context.Context, view View, change Change) time.Duration {
	w.keys = union(w.keys, change.Keys)
	hint := Change{Base: w.synced, Generation: view.Generation(), Keys: w.keys}
	sctx, cancel := context.WithTimeout(ctx, w.r.o.SyncTimeout)
	outcomes, err := w.call(sctx, view, hint)
	cancel()
	if ctx.Err() != nil {
		return 0
	}
	w.record(view, hint, outcomes, err)
	if err != nil {
		w.count.failures.Add(1)
		if !w.bad {
			w.log.Warn("sync failed; trying again", "err", err)
		}
		w.bad = true
		pause := w.pause
		w.pause = min(2*w.pause, w.r.o.RetryMax)
		return pause
	}
	w.count.syncs.Add(1)
	if w.bad {
		w.log.Info("in sync again")
	}
	if !w.once {
		w.once = true
		if w.r.waiting.Add(-1) == 0 {
			close(w.r.first)
		}
	}
	w.bad, w.pause, w.synced, w.keys = false, w.r.o.RetryMin, view.Generation(), nil
	return 0
}

// union returns the keys of both, each once. Each of a and b has a key once.
func union(a, b []port.Key) []port.Key {
	switch {
	case len(a) == 0:
		return b
	case len(b) == 0:
		return a
	}
	in := make(map[port.Key]struct{}, len(a))
	for _, k := range a {
		in[k] = struct{}{}
	}
	out := slices.Clone(a) // who has a may still hold it
	for _, k := range b {
		if _, ok := in[k]; !ok {
			out = append(out, k)
		}
	}
	return out
}

// call guards the loop against a sink that panics: it is that sink's failure alone.
func (w *worker) call(ctx context.Context, view View, hint Change) (out port.Outcomes, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("sink %s panicked: %v", w.sink.Name(), p)
		}
	}()
	out, err = w.sink.Sync(ctx, view, hint)
	if errors.Is(err, context.DeadlineExceeded) {
		err = fmt.Errorf("no answer within %s: %w", w.r.o.SyncTimeout, err)
	}
	return out, err
}

// record keeps what the sink said: its outcomes, for changed keys that it did
// not name after an error the error, and nothing for keys that are gone.
func (w *worker) record(view View, hint Change, said port.Outcomes, err error) {
	now := w.r.o.Now()
	w.r.outcomes.Update(func(tx *table.Tx[port.Key, Outcomes]) {
		asked := 0
		for _, k := range hint.Keys {
			outs, named := said[k]
			if named {
				asked++
			}
			_, wanted := view.Get(k)
			switch {
			case wanted && named:
				w.replace(tx, k, outs, now)
			case wanted && err != nil:
				w.replace(tx, k, []port.Outcome{{Key: k, State: port.Failed, Reason: err.Error()}}, now)
			case !wanted && err == nil:
				w.replace(tx, k, nil, now)
			}
		}
		if asked == len(said) {
			return
		}
		for k, outs := range said {
			if _, wanted := view.Get(k); wanted {
				w.replace(tx, k, outs, now) // once more changes nothing
			}
		}
	})
	if err != nil || w.r.o.Synced == nil {
		return
	}
	for _, k := range hint.Keys {
		active := slices.ContainsFunc(said[k], func(o port.Outcome) bool { return o.State == port.Active })
		if p, ok := view.Get(k); ok && active {
			w.r.o.Synced(w.sink.Name(), p)
		}
	}
}

// replace sets this sink's outcomes of one key and leaves those of other sinks.
func (w *worker) replace(tx *table.Tx[port.Key, Outcomes], k port.Key, said []port.Outcome, now time.Time) {
	old, _ := tx.Get(k)
	name := w.sink.Name()
	next := make(Outcomes, 0, len(old)+len(said))
	for _, o := range old {
		if o.Sink != name {
			next = append(next, o)
		}
	}
	for _, o := range said {
		o.Key, o.Since = k, now
		if i := slices.IndexFunc(old, func(p SinkOutcome) bool { return p.Sink == name && p.Equal(o) }); i >= 0 {
			o.Since = old[i].Since
		}
		next = append(next, SinkOutcome{name, o})
	}
	slices.SortFunc(next, func(a, b SinkOutcome) int {
		if a.Sink != b.Sink {
			return strings.Compare(a.Sink, b.Sink)
		}
		return a.HostAddress.Compare(b.HostAddress)
	})
	if len(next) == 0 {
		tx.Delete(k)
		return
	}
	if !slices.EqualFunc(old, next, func(a, b SinkOutcome) bool { return a.Sink == b.Sink && a.Equal(b.Outcome) }) {
		tx.Put(k, next)
	}
}
