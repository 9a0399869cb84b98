// SPDX-License-Identifier: Apache-2.0

// Package reconcile is the only loop that drives sinks: it turns the merged
// table into the wanted set (rules applied, what vanished held for a moment) and
// keeps each sink equal to it, with retries, on a worker of its own.
package reconcile

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/schedule"
	"github.com/fairlead/fairlead/internal/port/table"
)

// Options configures a Reconciler.
type Options struct {
	// HoldDown is how long a publication is still wanted after its last origin
	// vanished, so that an atomic rebuild or a restart resets no client. 0 is
	// allowed.
	HoldDown time.Duration
	// Ready, if not nil, is closed when the publications are complete. Until then,
	// or for ReadyTimeout (3 s if 0), no sink is synced: an incomplete set would
	// close ports that are still wanted.
	Ready        <-chan struct{}
	ReadyTimeout time.Duration
	// Missing, if not nil, returns the sources that Ready still waits for. It returns none
	// once Ready is closed.
	Missing func() []string
	// Reading, if not nil, returns when the sources that are sure to end are no longer
	// at work on their first set, as they are for long on a busy machine, or when ctx
	// ends. ReadyTimeout is extended until then, to 20 s at most.
	Reading func(ctx context.Context)
	// SyncTimeout bounds one Sync; 5 s if 0.
	SyncTimeout time.Duration
	// RetryMin and RetryMax bound the pause after a failed Sync, which doubles
	// each time; 100 ms and 5 s if 0.
	RetryMin, RetryMax time.Duration
	// Denied, if not nil, is called with the keys that a rule forbade while they
	// were wanted, so that their flows can be reset.
	Denied func([]port.Key)
	// Synced, if not nil, is called with the times of the events of the publications that a
	// sink made active, as far as they came by events (port.Publication.Observed).
	Synced func(sink string, observed []int64)
	// Follower, if not nil, is a sink that subscribes to the wanted set by itself.
	Follower Follower
	Logger   *slog.Logger
}

// Outcomes are those of all sinks for one publication, sorted by sink and host address.
type Outcomes []port.SinkOutcome

// Reconciler keeps sinks equal to a table of publications.
type Reconciler struct {
	o        Options
	log      *slog.Logger
	from     *table.Table[port.Key, port.Publication]
	sinks    []Sink
	wanted   *table.Table[port.Key, port.Publication]
	outcomes *table.Table[port.Key, Outcomes]
	counters []counters // of each of sinks, and of the follower

	first   chan struct{} // closed when every sink was in sync once
	waiting atomic.Int32  // sinks that were not

	missing    []string      // sources without which the sinks were begun; set before them
	complete   chan struct{} // closed when the wanted set has what all sources reported
	completeAt uint64        // the first generation of the wanted set that has; set before complete is closed
}

// counters are what Stats reads.
type counters struct{ syncs, failures, retries atomic.Uint64 }

// SinkStats counts what was asked of one sink since the start.
type SinkStats struct {
	Sink     string
	Syncs    uint64 `metric:"syncs_total" label:"result=ok" help:"Syncs of a sink with the wanted set."`
	Failures uint64 `metric:"syncs_total" label:"result=failed"`
	Retries  uint64 `metric:"sync_retries_total" help:"Syncs whose only reason was that the previous one failed."`
}

// Stats returns the counts of each sink, in the order of the sinks.
func (r *Reconciler) Stats() []SinkStats {
	stats := make([]SinkStats, 0, len(r.counters))
	add := func(name string) {
		c := &r.counters[len(stats)]
		stats = append(stats, SinkStats{name, c.syncs.Load(), c.failures.Load(), c.retries.Load()})
	}
	for _, s := range r.sinks {
		add(s.Name())
	}
	if r.o.Follower != nil {
		add(r.o.Follower.Name())
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
	r := &Reconciler{
		o: o, log: o.Logger, from: from, sinks: sinks,
		wanted:   table.New[port.Key, port.Publication](port.Key.Compare),
		outcomes: table.New[port.Key, Outcomes](port.Key.Compare),
		first:    make(chan struct{}),
		complete: make(chan struct{}),
	}
	n := len(sinks)
	if o.Follower != nil {
		n++
	}
	r.counters = make([]counters, n)
	r.waiting.Store(int32(n))
	if n == 0 {
		close(r.first)
	}
	return r
}

// FirstSync is closed once every sink was equal to the wanted set for the first time.
func (r *Reconciler) FirstSync() <-chan struct{} { return r.first }

// Incomplete returns the sources whose ports a generation of the wanted set may lack,
// because they had not reported yet: none once it has what all sources reported. Every
// sink is synced again when that changes. Only sinks may call it, in Sync.
func (r *Reconciler) Incomplete(generation uint64) []string {
	select {
	case <-r.complete:
		if generation >= r.completeAt {
			return nil
		}
	default:
	}
	return r.missing
}

// Wanted is the set that the sinks are kept equal to. Only the reconciler writes it.
func (r *Reconciler) Wanted() *table.Table[port.Key, port.Publication] { return r.wanted }

// Outcomes is what the sinks returned, by publication. Only the reconciler writes it.
func (r *Reconciler) Outcomes() *table.Table[port.Key, Outcomes] { return r.outcomes }

// Run drives the sinks until ctx ends.
func (r *Reconciler) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	begun := make(chan struct{})
	if f := r.o.Follower; f != nil {
		wg.Go(func() { f.Follow(ctx, &Record{r: r, name: f.Name(), count: &r.counters[len(r.sinks)], begun: begun}) })
	}
	var err error
	if r.missing, err = r.awaitReady(ctx); err != nil {
		return err
	}
	sub := r.from.Subscribe()
	defer sub.Close()
	h := holds{due: make(map[port.Key]time.Time), pending: make(map[port.Key]struct{})}
	// The wanted set is complete before the first sink is synced.
	view, change := sub.Take()
	r.apply(view, change, &h)
	if len(r.missing) == 0 {
		r.completed()
	}
	close(begun)
	for i, s := range r.sinks {
		wg.Go(func() { r.drive(ctx, s, &r.counters[i]) })
	}
	return r.want(ctx, sub, &h)
}

// completed notes that the wanted set has what all sources reported.
func (r *Reconciler) completed() {
	r.completeAt = r.wanted.View().Generation()
	close(r.complete)
}

// awaitReady returns the sources that have not reported in time.
func (r *Reconciler) awaitReady(ctx context.Context) (missing []string, err error) {
	if r.o.Ready == nil {
		return nil, nil
	}
	begin := time.Now()
	if err := schedule.Wait(ctx, begin.Add(r.o.ReadyTimeout), r.o.Ready); err != nil {
		return nil, err
	}
	if !closed(r.o.Ready) && r.o.Reading != nil {
		reading, stop := context.WithDeadline(ctx, begin.Add(readingMax))
		r.o.Reading(reading)
		stop()
	}
	if ctx.Err() != nil || closed(r.o.Ready) {
		return nil, ctx.Err()
	}
	if r.o.Missing != nil {
		missing = r.o.Missing()
	}
	r.log.Warn("some sources are not ready; continuing without them", "waited", time.Since(begin), "sources", missing)
	return missing, nil
}

func closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

const readingMax = 20 * time.Second // less than a host waits for its first snapshot

// want keeps the wanted set: what is allowed, and for the hold-down what was.
func (r *Reconciler) want(ctx context.Context, sub *table.Subscription[port.Key, port.Publication], h *holds) error {
	var ready <-chan struct{}
	if len(r.missing) > 0 {
		ready = r.o.Ready
	}
	for {
		var due <-chan time.Time
		if at := h.next(); !at.IsZero() {
			due = time.After(time.Until(at))
		}
		all := false
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-due:
		case <-sub.C():
		case <-ready:
			all, ready = true, nil
		}
		if view, change := sub.Take(); len(change.Keys) > 0 {
			r.apply(view, change, h)
		}
		r.expire(h)
		if all {
			r.completed()
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
			case there && p.Decision.Pending(): // it may turn out to be forbidden: at once
				delete(h.due, k)
				if wanted {
					h.pending[k] = struct{}{}
				}
				tx.Delete(k)
				h.release(tx, k.Slot())
			case there && !p.Decision.Withheld(): // forbidden by a rule: at once
				delete(h.due, k)
				if _, was := h.pending[k]; wanted || was {
					denied = append(denied, k)
				}
				delete(h.pending, k)
				tx.Delete(k)
				h.release(tx, k.Slot())
			case !there && !wanted:
				delete(h.pending, k)
			case wanted && r.o.HoldDown > 0 && !byName(old) && !forbidden(view, k.Slot()):
				h.add(k, time.Now().Add(r.o.HoldDown))
			default:
				tx.Delete(k)
			}
		}
	})
	if len(denied) > 0 && r.o.Denied != nil {
		r.o.Denied(denied)
	}
}

// byName reports whether somebody asked for p by name. Who asks no more wants it closed, and the
// rule that said where it is to be open has gone.
func byName(p port.Publication) bool {
	return len(p.Demands()) > 0
}

// forbidden reports whether something on a slot is denied by a rule, or may come to be:
// it must not be reached by a held port.
func forbidden(view View, s port.Slot) bool {
	for _, p := range view.Range(s.Bounds()) {
		if !p.Decision.Allow && !p.Decision.Withheld() {
			return true
		}
	}
	return false
}

func (r *Reconciler) expire(h *holds) {
	keys := h.expired(time.Now())
	if len(keys) == 0 {
		return
	}
	r.wanted.Update(func(tx *table.Tx[port.Key, port.Publication]) {
		for _, k := range keys {
			tx.Delete(k)
		}
	})
}

// holds are the keys that are held, and when each hold ends. As all are held
// equally long, they end in the order in which they began.
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

// release ends the holds on a slot: a client of the old server must not reach the
// new one by them.
func (h *holds) release(tx *table.Tx[port.Key, port.Publication], s port.Slot) {
	if len(h.due) == 0 {
		return
	}
	for _, k := range tx.Range(s.Bounds()) {
		if _, held := h.due[k]; held {
			delete(h.due, k)
			tx.Delete(k)
		}
	}
}

// skim drops holds from the front of the queue that were cancelled.
func (h *holds) skim() {
	for len(h.queue) > 0 && h.due[h.queue[0].key] != h.queue[0].at {
		h.queue = h.queue[1:]
	}
}

// next returns when the next hold ends, the zero time if there is none.
func (h *holds) next() time.Time {
	h.skim()
	if len(h.queue) == 0 {
		return time.Time{}
	}
	return h.queue[0].at
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
	w := worker{
		r: r, sink: s, count: count, log: r.log.With("sink", s.Name()),
		pause: schedule.Backoff{Min: r.o.RetryMin, Max: r.o.RetryMax},
	}
	sub := r.wanted.Subscribe()
	defer sub.Close()
	var retry <-chan time.Time // nil while the sink is in sync
	complete := r.complete
	if len(r.missing) == 0 {
		complete = nil
	}
	for {
		select {
		case <-ctx.Done():
			return
		case <-sub.C():
		case <-s.Wake():
		case <-complete:
			complete = nil
		case <-retry:
			count.retries.Add(1)
		}
		view, change := sub.Take()
		retry = nil
		if again := w.sync(ctx, view, change); again > 0 {
			retry = time.After(again)
		}
	}
}

// worker is the state of one sink's loop.
type worker struct {
	r     *Reconciler
	sink  Sink
	count *counters
	log   *slog.Logger
	pause schedule.Backoff
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
		if !w.pause.Failing() {
			w.log.Warn("sync failed; retrying", "err", err)
		}
		return w.pause.Next()
	}
	w.count.syncs.Add(1)
	if w.pause.Failing() {
		w.log.Info("in sync again")
	}
	if !w.once {
		w.once = true
		w.r.inSync()
	}
	w.pause.Reset()
	w.synced, w.keys = view.Generation(), nil
	return 0
}

// inSync notes that one more sink was in sync.
func (r *Reconciler) inSync() {
	if r.waiting.Add(-1) == 0 {
		close(r.first)
	}
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
	out := slices.Clone(a) // the sink may have kept a
	for _, k := range b {
		if _, ok := in[k]; !ok {
			out = append(out, k)
		}
	}
	return out
}

// call runs Sync. A panic in it is an error of this sink alone.
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

// record stores the sink's outcomes; after an error other than ErrPending, that error
// for changed keys without an outcome; and nothing for keys that are gone.
func (w *worker) record(view View, hint Change, outcomes port.Outcomes, err error) {
	now := time.Now()
	failed := err != nil && !errors.Is(err, ErrPending)
	var observed []int64
	w.r.outcomes.Update(func(tx *table.Tx[port.Key, Outcomes]) {
		asked := 0
		for _, k := range hint.Keys {
			outs, named := outcomes[k]
			if named {
				asked++
			}
			p, wanted := view.Get(k)
			switch {
			case wanted && named:
				replace(tx, w.sink.Name(), k, outs, now)
				if p.Observed != 0 && slices.ContainsFunc(outs, func(o port.Outcome) bool { return o.State == port.Active }) {
					observed = append(observed, p.Observed)
				}
			case wanted && failed:
				replace(tx, w.sink.Name(), k, []port.Outcome{{State: port.Failed, Reason: port.Because(port.SystemFailed, err.Error())}}, now)
			case !wanted && err == nil:
				replace(tx, w.sink.Name(), k, nil, now)
			}
		}
		if asked == len(outcomes) {
			return
		}
		for k, outs := range outcomes {
			if _, wanted := view.Get(k); wanted {
				replace(tx, w.sink.Name(), k, outs, now) // a second time changes nothing
			}
		}
	})
	if err == nil && len(observed) > 0 && w.r.o.Synced != nil {
		w.r.o.Synced(w.sink.Name(), observed)
	}
}

// replace sets the outcomes of one sink for one key and leaves those of other sinks.
func replace(tx *table.Tx[port.Key, Outcomes], name string, k port.Key, outcomes []port.Outcome, now time.Time) {
	old, _ := tx.Get(k)
	others := 0
	for _, o := range old {
		if o.Sink != name {
			others++
		}
	}
	next := make(Outcomes, 0, others+len(outcomes))
	for _, o := range old {
		if o.Sink != name {
			next = append(next, o)
		}
	}
	for _, o := range outcomes {
		n := port.SinkOutcome{Sink: name, Outcome: o}
		n.Since = now
		if i := slices.IndexFunc(old, n.Equal); i >= 0 {
			n.Since = old[i].Since
		}
		next = append(next, n)
	}
	slices.SortFunc(next, func(a, b port.SinkOutcome) int {
		if a.Sink != b.Sink {
			return strings.Compare(a.Sink, b.Sink)
		}
		return a.HostAddress.Compare(b.HostAddress)
	})
	if len(next) == 0 {
		tx.Delete(k)
		return
	}
	if !slices.EqualFunc(old, next, port.SinkOutcome.Equal) {
		tx.Put(k, next)
	}
}
