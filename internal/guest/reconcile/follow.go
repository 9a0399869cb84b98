// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"context"
	"slices"
	"time"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/table"
)

// Follower is a sink that subscribes to the wanted set, and records what becomes of it.
type Follower interface {
	Name() string
	// Follow is called once. It returns when ctx ends.
	Follow(ctx context.Context, r *Record)
}

// Record is where a Follower has the wanted set from, and where its outcomes go.
type Record struct {
	r     *Reconciler
	name  string
	count *counters
	begun chan struct{}
	once  bool
}

// Begun is closed when the wanted set is as complete as it is for the first Sync of other sinks.
// Nothing is to be published before.
func (d *Record) Begun() <-chan struct{} { return d.begun }

// Wanted is the wanted set.
func (d *Record) Wanted() *table.Table[port.Key, port.Publication] { return d.r.wanted }

// Incomplete is Reconciler.Incomplete.
func (d *Record) Incomplete(generation uint64) []string { return d.r.Incomplete(generation) }

// Complete is closed when Incomplete has become empty.
func (d *Record) Complete() <-chan struct{} { return d.r.complete }

// Update changes outcomes of the follower in one step. One call at a time.
func (d *Record) Update(f func(*RecordTx)) {
	now := time.Now()
	d.r.outcomes.Update(func(tx *table.Tx[port.Key, Outcomes]) { f(&RecordTx{tx, d.name, now}) })
}

// Keys returns the keys that the follower has outcomes of.
func (d *Record) Keys() (keys []port.Key) {
	for k, list := range d.r.outcomes.View().All() {
		if slices.ContainsFunc(list, func(o port.SinkOutcome) bool { return o.Sink == d.name }) {
			keys = append(keys, k)
		}
	}
	return keys
}

// InSync notes that what the wanted set had is open, or waits for a reason that the follower
// has recorded: with the times of the events of the publications that became active by it. See
// Reconciler.FirstSync and Options.Synced. One call at a time.
func (d *Record) InSync(observed []int64) {
	d.count.syncs.Add(1)
	if len(observed) > 0 && d.r.o.Synced != nil {
		d.r.o.Synced(d.name, observed)
	}
	if !d.once {
		d.once = true
		d.r.inSync()
	}
}

// Failed counts a failure of the follower.
func (d *Record) Failed() { d.count.failures.Add(1) }

// RecordTx is one step of changes of a Record.
type RecordTx struct {
	tx   *table.Tx[port.Key, Outcomes]
	name string
	now  time.Time
}

// Set replaces the outcomes of a key; none is allowed.
func (x *RecordTx) Set(k port.Key, outcomes ...port.Outcome) {
	replace(x.tx, x.name, k, outcomes, x.now)
}

// Get returns the outcomes of a key that the follower has set.
func (x *RecordTx) Get(k port.Key) (list []port.SinkOutcome) {
	all, _ := x.tx.Get(k)
	for _, o := range all {
		if o.Sink == x.name {
			list = append(list, o)
		}
	}
	return list
}
