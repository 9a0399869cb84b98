// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/table"
)

// SourceState tells whether a source's set can be trusted.
type SourceState string

// The states of a source.
const (
	Starting SourceState = "starting" // has not yet reported a complete set
	Live     SourceState = "live"
	Stale    SourceState = "stale" // its last set is kept, and may be old
	Disabled SourceState = "disabled"
)

// SourceStatus is what status shows of a source.
type SourceStatus struct {
	Name   string
	State  SourceState
	Method string
	Lack   port.Lack
	Error  string
	Since  time.Time // of this state
	// Warnings are what the source could not use, sorted. Immutable.
	Warnings []string
}

func (s SourceStatus) equal(t SourceStatus) bool {
	return s.Name == t.Name && s.State == t.State && s.Method == t.Method && s.Lack == t.Lack && s.Error == t.Error &&
		s.Since.Equal(t.Since) && slices.Equal(s.Warnings, t.Warnings)
}

func compareString(a, b string) int { return cmp.Compare(a, b) }

// source implements Feed. Its fields are guarded by the registry's lock.
type source struct {
	r        *Registry
	name     string
	order    int              // among the sources
	set      map[string]*kept // by origin id
	status   SourceStatus
	complete bool // it has reported a complete set
	optional bool // see OptionalFeed

	last struct { // what keep returned last
		owner *port.Owner
		hints *port.Hints
	}
}

var _ Feed = (*source)(nil)

func (s *source) Replace(set []port.Binding) {
	s.r.mu.Lock()
	defer s.r.mu.Unlock()
	dirty := new(touched)
	next := make(map[string]*port.Binding, len(set))
	for i := range set {
		next[set[i].Origin.ID] = &set[i]
	}
	for id, b := range s.set {
		if _, ok := next[id]; !ok {
			s.drop(b, dirty)
		}
	}
	for i := range set {
		if b := &set[i]; next[b.Origin.ID] == b { // of equal origins the last
			s.put(b, dirty)
		}
	}
	s.r.merge(dirty)
	s.r.shrink()
	s.live()
	if s.complete {
		return
	}
	s.complete = true
	if s.r.pending--; s.r.pending == 0 {
		close(s.r.ready)
	}
}

func (s *source) Apply(c port.Change) {
	s.r.mu.Lock()
	defer s.r.mu.Unlock()
	dirty := &touched{slots: make([]touchedSlot, 0, len(c.Put)+len(c.Drop))}
	for _, o := range c.Drop {
		if b, ok := s.set[o.ID]; ok {
			s.drop(b, dirty)
		}
	}
	for i := range c.Put {
		s.put(&c.Put[i], dirty)
	}
	s.r.merge(dirty)
	s.r.shrink()
}

// put adds or replaces one binding, and keeps the time at which its origin was first seen.
func (s *source) put(reported *port.Binding, dirty *touched) {
	old, had := s.set[reported.Origin.ID]
	if had && old.same(reported) {
		return
	}
	b := s.keep(reported)
	var replaced member
	switch {
	case had:
		b.Since = old.Since
		replaced = s.drop(old, dirty)
	case b.Since.IsZero():
		b.Since = s.r.now()
	}
	s.set[b.Origin.ID] = b
	s.r.insert(s, b, reported.Observed, replaced)
	dirty.mark(b.Slot(), reported.Observed)
}

func (s *source) drop(b *kept, dirty *touched) (dropped member) {
	delete(s.set, b.Origin.ID)
	dirty.mark(b.Slot(), 0)
	return s.r.remove(b)
}

func (s *source) Stale(err error) {
	s.r.mu.Lock()
	defer s.r.mu.Unlock()
	text := fmt.Sprint(err)
	if s.status.State == Stale && s.status.Error == text {
		return
	}
	if s.status.State != Stale {
		s.r.log.Warn("source is stale; keeping its last set", "source", s.name, "err", err)
	}
	st := s.status
	st.State, st.Error, st.Lack = Stale, text, port.LackNothing
	if errors.Is(err, ErrUnusable) {
		st.Lack = port.LackSettings
	}
	s.setStatus(st)
}

func (s *source) Method(name string) { s.Lacks(port.LackNothing, name) }

func (s *source) Lacks(lack port.Lack, why string) {
	s.r.mu.Lock()
	defer s.r.mu.Unlock()
	st := s.status
	st.Method, st.Lack = why, lack
	s.setStatus(st)
}

// loggedWarnings bounds what the guest's bad data can write into the log at once.
const loggedWarnings = 100

func (s *source) Warn(texts []string) {
	s.r.mu.Lock()
	defer s.r.mu.Unlock()
	for _, t := range texts[:min(len(texts), loggedWarnings)] {
		if !slices.Contains(s.status.Warnings, t) {
			s.r.log.Warn("source ignores bad data", "source", s.name, "warning", t)
		}
	}
	st := s.status
	st.Warnings = slices.Clone(texts)
	s.setStatus(st)
}

// live ends staleness. A source that is live already costs nothing.
func (s *source) live() {
	if s.status.State == Live {
		return
	}
	if s.status.State == Stale {
		s.r.log.Info("source is live again", "source", s.name)
	}
	st := s.status
	st.State, st.Error = Live, ""
	s.setStatus(st)
}

func (s *source) setStatus(st SourceStatus) {
	if st.equal(s.status) {
		return
	}
	if st.State != s.status.State {
		st.Since = s.r.now()
	}
	changed := st.State != s.status.State
	s.status = st
	s.r.status.Update(func(tx *table.Tx[string, SourceStatus]) {
		if s.optional && st.State == Live && st.Method == "" && len(st.Warnings) == 0 {
			tx.Delete(s.name)
			return
		}
		tx.Put(s.name, st)
	})
	if changed && s.r.engines[s.name] {
		s.r.engineStateChanged(s)
	}
}
