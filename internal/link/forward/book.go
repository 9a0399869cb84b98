// SPDX-License-Identifier: Apache-2.0

package forward

import (
	"context"
	"sync"

	"github.com/fairlead/fairlead/internal/port"
)

// Book records the flows that are open, by publication, so that their number
// can be limited and those of one publication can be reset. It is safe for
// concurrent use.
type Book struct {
	limit int

	mu    sync.Mutex
	flows map[port.Key]map[*Flow]struct{}
	open  map[port.Protocol]int
}

// NewBook returns an empty book that takes up to limit flows of each protocol at one
// time: a flood of UDP clients leaves room for TCP.
func NewBook(limit int) *Book {
	return &Book{limit: limit, flows: make(map[port.Key]map[*Flow]struct{}), open: make(map[port.Protocol]int)}
}

// Flow is one entry of a Book. End must be called.
type Flow struct {
	book   *Book
	key    port.Key
	cancel context.CancelCauseFunc

	outside, exposed bool // see Outside; guarded by book.mu
}

// Begin enters a flow of a publication. Its context ends with ctx, or by Reset.
// The flow is nil if there are too many of its protocol.
func (b *Book) Begin(ctx context.Context, k port.Key) (context.Context, *Flow) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.open[k.Protocol] >= b.limit {
		return ctx, nil
	}
	ctx, cancel := context.WithCancelCause(ctx)
	f := &Flow{book: b, key: k, cancel: cancel}
	if b.flows[k] == nil {
		b.flows[k] = make(map[*Flow]struct{})
	}
	b.flows[k][f] = struct{}{}
	b.open[k.Protocol]++
	return ctx, f
}

// Outside marks the flow as one to an address that other machines reach; exposed says that
// they do so for a time only.
func (f *Flow) Outside(exposed bool) {
	f.book.mu.Lock()
	defer f.book.mu.Unlock()
	f.outside, f.exposed = true, exposed
}

// Reset ends the flow's context with a cause, unless it has ended.
func (f *Flow) Reset(cause error) { f.cancel(cause) }

// End takes the flow out of its book and ends its context. It may be called more
// than once.
func (f *Flow) End() {
	f.cancel(nil)
	b := f.book
	b.mu.Lock()
	defer b.mu.Unlock()
	of := b.flows[f.key]
	if _, ok := of[f]; !ok {
		return
	}
	delete(of, f)
	if len(of) == 0 {
		delete(b.flows, f.key)
	}
	b.open[f.key.Protocol]--
}

// Reset resets all flows of these publications.
func (b *Book) Reset(cause error, keys ...port.Key) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, k := range keys {
		for f := range b.flows[k] {
			f.cancel(cause)
		}
	}
}

// ResetOutside resets the flows of a publication to addresses that other machines reach.
func (b *Book) ResetOutside(cause error, k port.Key) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for f := range b.flows[k] {
		if f.outside {
			f.cancel(cause)
		}
	}
}

// ResetExposed resets the flows that other machines may have for a time only, but those of
// publications to keep, which must not call the book.
func (b *Book) ResetExposed(cause error, keep func(port.Key) bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for k, flows := range b.flows {
		for f := range flows {
			if f.exposed && !keep(k) {
				f.cancel(cause)
			}
		}
	}
}

// Len returns how many flows are open.
func (b *Book) Len() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.count()
}

// count is Len. b.mu is held.
func (b *Book) count() (n int) {
	for _, v := range b.open {
		n += v
	}
	return n
}

// Open returns how many flows of a protocol are open.
func (b *Book) Open(p port.Protocol) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.open[p]
}
