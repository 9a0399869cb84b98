// SPDX-License-Identifier: Apache-2.0

package replica

import (
	"github.com/fairlead/fairlead/internal/link/wire"
)

// Step is one step of a table of the peer: from the state that it had to the next one. A key may
// be in both Removed and Put: it is removed first.
type Step[K comparable, V any] struct {
	Generation uint64
	Whole      bool // Put is the whole table
	Put        []V
	Removed    []K
	Partial    []string // sources of the peer that the table may lack
	Omitted    int      // rows that the peer does not send
}

// Receive has apply called with each step of a table of the peer. An error of it ends the
// session. To be called before Run.
func Receive[K comparable, V any](s *Session, kind Kind[K, V], apply func(Step[K, V]) error) {
	s.receivers[kind.Name] = &incoming[K, V]{kind: kind, do: apply}
}

// receiver is one table that is received.
type receiver interface {
	// decode reads the rows of a message, and returns how many it names. It needs no lock.
	decode(f *wire.Frame) (rows any, n int, err error)
	// apply takes a message. It reports whether that completed a step.
	apply(f *wire.Frame, rows any) (done bool, err error)
	// reset has it wait for the whole table.
	reset()
	acked() bool
}

type incoming[K comparable, V any] struct {
	kind Kind[K, V]
	do   func(Step[K, V]) error

	synced bool
	at     uint64
	// parts is what has come of a step, nil between steps.
	parts *Step[K, V]
	base  uint64 // of parts
	part  int    // that comes next
	bytes int    // as which the rows of parts count
}

type rows[K comparable, V any] struct {
	put     []V
	removed []K
	size    int // of put, by Kind.Size
}

func (r *incoming[K, V]) acked() bool { return r.kind.Acked }

func (r *incoming[K, V]) reset() { r.synced, r.parts = false, nil }

func (r *incoming[K, V]) decode(f *wire.Frame) (any, int, error) {
	put, err := wire.DecodeRows(f.Put, r.kind.Check)
	if err != nil {
		return nil, 0, err
	}
	size := 0
	if r.kind.Size != nil {
		for _, v := range put {
			size += r.kind.Size(v)
		}
	}
	removed, err := wire.DecodeRows(f.Removed, r.kind.CheckKey)
	return rows[K, V]{put, removed, size}, len(put) + len(removed), err
}

func (r *incoming[K, V]) apply(f *wire.Frame, content any) (bool, error) {
	whole := f.Base == 0
	if !r.synced && r.parts == nil && (!whole || f.Part > 0) {
		return false, nil // it follows what was lost
	}
	if r.parts == nil {
		r.parts, r.base, r.part, r.bytes = &Step[K, V]{Generation: f.Generation, Whole: whole}, f.Base, 0, 0
	}
	switch {
	case r.part == 0 && !whole && f.Base != r.at:
		return false, wire.Malformed("change of %s is based on generation %d, current is %d", r.kind.Name, f.Base, r.at)
	case f.Part != r.part || f.Base != r.base || f.Generation != r.parts.Generation:
		return false, wire.Malformed("part %d of generation %d of %s, want part %d of %d", f.Part, f.Generation, r.kind.Name, r.part, r.parts.Generation)
	}
	r.part++
	p, c := r.parts, content.(rows[K, V])
	p.Put, p.Removed = append(p.Put, c.put...), append(p.Removed, c.removed...)
	r.bytes += max(c.size, len(f.Put)-len(c.put)-1) // without brackets and commas
	if max(len(p.Put), len(p.Removed)) > r.kind.Max || r.bytes > r.kind.MaxBytes {
		return false, wire.Malformed("more than %d rows of %s, or than %d bytes", r.kind.Max, r.kind.Name, r.kind.MaxBytes)
	}
	if f.More {
		return false, nil
	}
	p.Partial, p.Omitted = f.Partial, f.Omitted
	r.parts = nil
	if err := r.do(*p); err != nil {
		return false, err
	}
	r.synced, r.at = true, p.Generation
	return true, nil
}
