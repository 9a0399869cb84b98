// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/table"
)

// SourceState says whether a source's set can be trusted.
type SourceState string

// The states of a source.
const (
	Starting SourceState = "starting" // has not yet said a complete set
	Live     SourceState = "live"
	Stale    SourceState = "stale" // what it said last stands, and may be old
	Disabled SourceState = "disabled"
)

// SourceStatus is what status shows of a source.
type SourceStatus struct {
	Name  string
	State SourceState
	Rung  string
	Error string
	Since time.Time // of this state
	// Warnings are what the source could not use, sorted. Immutable.
	Warnings []string
}

func (s SourceStatus) equal(t SourceStatus) bool {
	return s.Name == t.Name && s.State == t.State && s.Rung == t.Rung && s.Error == t.Error &&
		s.Since.Equal(t.Since) && slices.Equal(s.Warnings, t.Warnings)
}

func compareString(a, b string) int { return cmp.Compare(a, b) }

// source implements Feed. Its fields are guarded by the registry's lock.
type source struct {
	r      *Registry
	name   string
	rank   int
	set    map[string]port.Binding // by origin id
	status SourceStatus
	heard  bool // it has said a complete set
}

var _ Feed = (*source)(nil)

func (s *source) Replace(set []port.Binding) {
	s.r.mu.Lock()
	defer s.r.mu.Unlock()
	dirty := make(map[port.Slot]struct{})
	next := make(map[string]port.Binding, len(set))
	for _, b := range set {
		next[b.Origin.ID] = b
	}
	for id, b := range s.set {
		if _, ok := next[id]; !ok {
			s.drop(b, dirty)
		}
	}
	for _, b := range next {
		s.put(b, dirty)
	}
	s.r.merge(dirty)
	s.live()
	if s.heard {
		return
	}
	s.heard = true
	if s.r.pending--; s.r.pending == 0 {
		close(s.r.ready)
	}
}

func (s *source) Apply(c port.Change) {
	s.r.mu.Lock()
	defer s.r.mu.Unlock()
	dirty := make(map[port.Slot]struct{}, len(c.Put)+len(c.Drop))
	for _, o := range c.Drop {
		if b, ok := s.set[o.ID]; ok {
			s.drop(b, dirty)
		}
	}
	for _, b := range c.Put {
		s.put(b, dirty)
	}
	s.r.merge(dirty)
}

// put adds or replaces one binding and keeps the time at which its origin was first seen.
func (s *source) put(b port.Binding, dirty map[port.Slot]struct{}) {
	b.Origin.Source = s.name
	if old, ok := s.set[b.Origin.ID]; ok {
		b.Since = old.Since
		if equalBinding(old, b) {
			return
		}
		s.drop(old, dirty)
	}
	if b.Since.IsZero() {
		b.Since = s.r.now()
	}
	s.set[b.Origin.ID] = b
	s.r.insert(s.rank, b)
	dirty[b.Slot()] = struct{}{}
}

func (s *source) drop(b port.Binding, dirty map[port.Slot]struct{}) {
	delete(s.set, b.Origin.ID)
	s.r.remove(b)
	dirty[b.Slot()] = struct{}{}
}

func equalBinding(a, b port.Binding) bool {
	return a.Key == b.Key && a.Origin == b.Origin && a.DualStack == b.DualStack && a.Withheld == b.Withheld &&
		slices.Equal(a.Dial, b.Dial) && a.Owner.Equal(b.Owner) && a.Hints.Equal(b.Hints) && a.Detail == b.Detail
}

func (s *source) Stale(err error) {
	s.r.mu.Lock()
	defer s.r.mu.Unlock()
	text := fmt.Sprint(err)
	if s.status.State == Stale && s.status.Error == text {
		return
	}
	if s.status.State != Stale {
		s.r.log.Warn("source is stale; what it last said stands", "source", s.name, "err", err)
	}
	st := s.status
	st.State, st.Error = Stale, text
	s.setStatus(st)
}

func (s *source) Rung(name string) {
	s.r.mu.Lock()
	defer s.r.mu.Unlock()
	st := s.status
	st.Rung = name
	s.setStatus(st)
}

// loggedWarnings bounds what the guest's bad data can write into the log at once.
const loggedWarnings = 100

func (s *source) Warn(texts []string) {
	s.r.mu.Lock()
	defer s.r.mu.Unlock()
	for _, t := range texts[:min(len(texts), loggedWarnings)] {
		if !slices.Contains(s.status.Warnings, t) {
			s.r.log.Warn("source cannot use what it was told", "source", s.name, "what", t)
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
	s.status = st
	s.r.status.Update(func(tx *table.Tx[string, SourceStatus]) { tx.Put(s.name, st) })
}
