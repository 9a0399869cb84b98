// SPDX-License-Identifier: Apache-2.0

package replica

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fairlead/fairlead/internal/link/wire"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/table"
)

const (
	partRows  = 512 // of one message
	pacedRows = 64  // of one message of a paced table, which others may have to wait for
	partBytes = wire.MaxControlFrame - 8<<10

	// pacedPause is between two changes of a paced table, so that a row that is there for a
	// moment is not sent at all.
	pacedPause = 100 * time.Millisecond
	// maxUnseen is how many steps of an acknowledged table are on their way at most: a peer that
	// takes them slowly is not sent each step, but the state that there is when it has seen some.
	maxUnseen = 64
	// lateAfter is how long a peer may take to say what it has seen until it is late.
	lateAfter = 5 * time.Second
)

// From is where the rows of a table that is sent come from. Table and Row are required.
type From[K, V any, L comparable, LV any] struct {
	Table *table.Table[L, LV]
	// Begin, if not nil, is closed when the table may be sent; see Session.Changed.
	Begin <-chan struct{}
	// Only selects the rows that are sent; nil for all. It is a pure function.
	Only func(LV) bool
	// Key and Row convert what is in Table.
	Key func(L) K
	Row func(LV) V
	// Partial, if not nil, returns the sources that a generation of Table may lack.
	Partial func(generation uint64) []string
	// Sent, if not nil, is called before the last message of a step leaves: with the state that
	// the peer will have, the keys that may have changed, and those of them that are not sent.
	Sent func(view table.View[L, LV], keys []L, refused map[L]error)
	// Acked, if not nil, is called when the peer says that it has seen a generation.
	Acked func(generation uint64)
	// Late, if not nil, is called when the peer has not done so for five seconds, and again
	// every five.
	Late func()
}

// Send has the session keep a table of the peer equal to rows of ours. To be called before Run.
func Send[K comparable, V any, L comparable, LV any](s *Session, kind Kind[K, V], from From[K, V, L, LV]) {
	s.senders = append(s.senders, &outgoing[K, V, L, LV]{s: s, kind: kind, from: from, left: make(map[L]bool)})
}

// sender is one table that is sent. Session.out is held unless a method says otherwise.
type sender interface {
	name() string
	paced() bool
	answers() string
	ready() bool // the table may be sent
	// begin takes what has changed as the next step, unless one is under way.
	begin()
	under() bool // a step is under way
	rest() int   // keys of it that are to be looked at
	// frame returns the next message of the step, nil if there is none.
	frame(now time.Time) *wire.Frame
	// restart has the next step be the whole table. It needs no lock.
	restart()
	// seen notes what the peer has seen. It needs no lock.
	seen(generation uint64, now time.Time) error
	// due returns when there is something to do, the zero time if that is when something changes.
	due(now time.Time) time.Time
	// tick does what time brings. It fails if the peer has been silent for too long.
	tick(now time.Time) error
	close()
}

// step is what is being sent.
type step[L comparable, LV any] struct {
	view    table.View[L, LV]
	keys    []L
	pos     int
	whole   bool
	tried   bool // rows that were left out were tried again
	refused map[L]error
	partial port.List[string]
}

type outgoing[K comparable, V any, L comparable, LV any] struct {
	s    *Session
	kind Kind[K, V]
	from From[K, V, L, LV]

	sub   *table.Subscription[L, LV]
	again atomic.Bool // the whole table is to be sent
	news  atomic.Bool // of a paced table: something changed

	has     table.View[L, LV] // what the peer has, but for what is left out
	at      uint64            // its generation for the peer
	left    map[L]bool        // not sent; true: for want of room, which there may be later
	rows    int               // that the peer has
	bytes   int               // as which they count
	partial []string          // as the peer knows
	now     *step[L, LV]      // nil for none
	parts   int               // of now, that were made
	free    time.Time         // of a paced table: when a step may begin
	when    time.Time         // of a paced table: when the next one begins, zero for never

	mu     sync.Mutex
	sent   uint64
	unseen []uint64  // generations that were sent, and not seen yet
	since  time.Time // something is waited for, or the peer has last seen something
	lateAt time.Time
}

func (t *outgoing[K, V, L, LV]) name() string    { return t.kind.Name }
func (t *outgoing[K, V, L, LV]) paced() bool     { return t.kind.Rate > 0 }
func (t *outgoing[K, V, L, LV]) answers() string { return t.kind.Answers }
func (t *outgoing[K, V, L, LV]) ready() bool {
	select {
	case <-t.from.Begin:
	default:
		if t.from.Begin != nil {
			return false
		}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.unseen) < maxUnseen || t.again.Load() // who asks for the whole table may have lost the rest
}

func (t *outgoing[K, V, L, LV]) under() bool { return t.now != nil }
func (t *outgoing[K, V, L, LV]) restart()    { t.again.Store(true); t.changed() }

func (t *outgoing[K, V, L, LV]) rest() int {
	if t.now == nil {
		return 0
	}
	return len(t.now.keys) - t.now.pos
}

// changed is called by whoever changed the table.
func (t *outgoing[K, V, L, LV]) changed() {
	switch {
	case !t.paced():
		t.s.try()
	case !t.news.Swap(true):
		t.s.wake.Notify()
	}
}

func (t *outgoing[K, V, L, LV]) subscribe() {
	if t.from.Only == nil {
		t.sub = t.from.Table.Subscribe()
	} else {
		t.sub = t.from.Table.SubscribeTo(t.from.Only)
	}
	t.sub.OnChange(t.changed)
	t.again.Store(true)
}

func (t *outgoing[K, V, L, LV]) begin() {
	if t.now != nil {
		return
	}
	t.news.Store(false)
	t.when = time.Time{}
	if t.sub == nil {
		t.subscribe()
	}
	whole := t.again.Swap(false)
	view, change := t.sub.Take()
	s := &step[L, LV]{view: view, keys: change.Keys, whole: whole}
	if t.from.Partial != nil {
		s.partial = wire.FitSources(t.from.Partial(view.Generation()))
	}
	switch {
	case whole:
		t.takeAll(s)
		t.s.o.Stats.Snapshots.Add(1)
	case len(s.keys) == 0 && slices.Equal(s.partial, t.partial):
		return
	default:
		t.s.o.Stats.Changes.Add(1)
	}
	t.now, t.parts = s, 0
}

// takeAll has a step be the whole table.
func (t *outgoing[K, V, L, LV]) takeAll(s *step[L, LV]) {
	s.keys = nil
	for k, v := range s.view.All() {
		if t.selects(v) {
			s.keys = append(s.keys, k)
		}
	}
	t.has, t.rows, t.bytes = table.View[L, LV]{}, 0, 0
	clear(t.left)
	t.mu.Lock()
	defer t.mu.Unlock()
	t.unseen = nil
}

func (t *outgoing[K, V, L, LV]) selects(v LV) bool { return t.from.Only == nil || t.from.Only(v) }

// get returns the row of a key in a view, if it is to be sent.
func (t *outgoing[K, V, L, LV]) get(view table.View[L, LV], k L) (v LV, ok bool) {
	v, ok = view.Get(k)
	return v, ok && t.selects(v)
}

// row encodes one row, and returns how much it counts. An error is why it is not sent.
func (t *outgoing[K, V, L, LV]) row(v LV) (b []byte, size int, err error) {
	row := t.from.Row(v)
	if err := t.kind.Check(row); err != nil {
		return nil, 0, err
	}
	b, err = wire.EncodeRow(row)
	if len(b) > partBytes {
		return nil, 0, errors.New("it is too large for a message")
	}
	size = len(b)
	if t.kind.Size != nil {
		size = max(size, t.kind.Size(row))
	}
	return b, size, err
}

func (t *outgoing[K, V, L, LV]) frame(now time.Time) *wire.Frame {
	s := t.now
	if s == nil {
		return nil
	}
	limit := t.s.part
	if t.paced() {
		limit = pacedRows
	}
	put, removed := rowList{}, rowList{}
	for {
		if s.pos == len(s.keys) && !s.tried {
			t.retry(s)
		}
		if s.pos == len(s.keys) || put.n+removed.n == limit || !t.add(s, s.keys[s.pos], &put, &removed) {
			break
		}
		s.pos++
	}
	f := &wire.Frame{
		Table: t.kind.Name, Generation: s.view.Generation(), Put: put.value(), Removed: removed.value(),
		Partial: s.partial, Omitted: len(t.left), More: s.pos < len(s.keys), Part: t.parts,
	}
	t.parts++
	if !s.whole {
		f.Base = t.at
	}
	if !f.More {
		t.done(now, f)
	}
	return f
}

// retry looks again at rows that were left out, as far as there may be room now.
func (t *outgoing[K, V, L, LV]) retry(s *step[L, LV]) {
	s.tried = true
	if s.whole {
		return
	}
	for k, later := range t.left {
		if !later {
			continue
		}
		if len(s.keys)-s.pos >= t.kind.Max-t.rows {
			return
		}
		s.keys = append(s.keys, k)
	}
}

// add adds what became of a key to a message. It reports whether there was room.
func (t *outgoing[K, V, L, LV]) add(s *step[L, LV], k L, put, removed *rowList) bool {
	v, there := t.get(s.view, k)
	old, had := t.get(t.has, k)
	if _, left := t.left[k]; left {
		had = false
	}
	var b, key []byte
	var size int
	var err error
	if there {
		b, size, err = t.row(v)
	}
	if had {
		key, _ = wire.EncodeRow(t.from.Key(k)) // it was sent before
	}
	if put.n+removed.n > 0 && put.bytes+removed.bytes+len(b)+len(key) > partBytes {
		return false
	}
	rows, bytes := t.rows, t.bytes
	if had {
		rows, bytes = rows-1, bytes-t.size(old)
	}
	later := false
	if there && err == nil && (rows == t.kind.Max || bytes+size > t.kind.MaxBytes) {
		later, err = true, fmt.Errorf("more than %d rows, or than %d MiB", t.kind.Max, t.kind.MaxBytes>>20)
	}
	delete(t.left, k)
	switch {
	case there && err == nil:
		rows, bytes = rows+1, bytes+size
		put.add(b)
	case there:
		t.left[k] = later
		if s.refused == nil {
			s.refused = make(map[L]error)
		}
		s.refused[k] = err
	}
	if had && (!there || err != nil) {
		removed.add(key)
	}
	t.rows, t.bytes = rows, bytes
	return true
}

func (t *outgoing[K, V, L, LV]) size(v LV) int {
	_, size, _ := t.row(v) // it was sent before
	return size
}

// done ends a step with its last message.
func (t *outgoing[K, V, L, LV]) done(now time.Time, f *wire.Frame) {
	s := t.now
	t.now = nil
	t.has, t.at, t.partial = s.view, f.Generation, s.partial
	if t.paced() {
		t.free = now.Add(max(pacedPause, time.Duration(len(s.keys))*time.Second/time.Duration(t.kind.Rate)))
	}
	if t.from.Sent != nil {
		t.from.Sent(s.view, s.keys, s.refused)
	}
	if !t.kind.Acked {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.unseen) == 0 {
		t.since, t.lateAt = now, now.Add(lateAfter)
	}
	t.sent, t.unseen = f.Generation, append(t.unseen, f.Generation)
}

func (t *outgoing[K, V, L, LV]) seen(generation uint64, now time.Time) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if generation > t.sent || !t.kind.Acked {
		return wire.Malformed("generation %d of %s was not sent", generation, t.kind.Name)
	}
	t.unseen = slices.DeleteFunc(t.unseen, func(g uint64) bool { return g <= generation })
	t.since, t.lateAt = now, now.Add(lateAfter)
	if t.from.Acked != nil {
		t.from.Acked(generation)
	}
	return nil
}

func (t *outgoing[K, V, L, LV]) due(now time.Time) time.Time {
	if t.paced() && t.now == nil && (t.news.Load() || t.sub == nil) {
		if t.when.IsZero() {
			if t.when = now.Add(pacedPause); t.when.Before(t.free) {
				t.when = t.free
			}
		}
		return t.when
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.unseen) == 0 {
		return time.Time{}
	}
	if end := t.since.Add(t.s.o.Patience); end.Before(t.lateAt) {
		return end
	}
	return t.lateAt
}

func (t *outgoing[K, V, L, LV]) tick(now time.Time) error {
	t.mu.Lock()
	waiting := len(t.unseen) > 0
	late, hopeless := waiting && !now.Before(t.lateAt), waiting && !now.Before(t.since.Add(t.s.o.Patience))
	if late {
		t.lateAt = now.Add(lateAfter)
	}
	t.mu.Unlock()
	if hopeless {
		return fmt.Errorf("%w: nothing of %s was acknowledged for %s", ErrSilent, t.kind.Name, t.s.o.Patience)
	}
	if late && t.from.Late != nil {
		t.from.Late()
	}
	return nil
}

func (t *outgoing[K, V, L, LV]) close() {
	if t.sub != nil {
		t.sub.Close()
	}
}

// rowList is a JSON list that is being written.
type rowList struct {
	n, bytes int
	b        []byte
}

func (l *rowList) add(row []byte) {
	sep := byte(',')
	if l.n == 0 {
		sep = '['
	}
	l.b = append(append(l.b, sep), row...)
	l.n, l.bytes = l.n+1, l.bytes+len(row)+1
}

// value returns the list, nil if it is empty.
func (l *rowList) value() []byte {
	if l.n == 0 {
		return nil
	}
	return append(l.b, ']')
}
