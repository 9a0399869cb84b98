// SPDX-License-Identifier: Apache-2.0

package forwards

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/config/rules"
	"github.com/fairlead/fairlead/internal/config/trust"
	"github.com/fairlead/fairlead/internal/port/schedule"
)

// Store changes the file of requests of a running agent or host, and has their rules applied.
type Store struct {
	path   string // empty for none
	guests bool   // requests may name guests
	log    *slog.Logger
	apply  func(*rules.Set)

	uptime func() time.Duration // of this process; unlike the clock nobody sets it

	mu      sync.Mutex
	base    *rules.Set               // of the configuration
	entries []Entry                  // of the file as it was read or written last; some may have ended
	applied uint64                   // how often a set was applied
	changed schedule.Signal          // for Run: the entries are others
	ends    map[string]time.Duration // uptime at which a request that exposes ends, by its text and end
}

// NewStore returns a store of the file at path, which may be absent; an empty path is none.
// Base is the rules of the configuration, with those of the file. Guests says that this is a host,
// where requests may name guests. Apply is called with each new set of rules, one call at a time.
func NewStore(path string, base *rules.Set, guests bool, log *slog.Logger, apply func(*rules.Set)) *Store {
	start := time.Now()
	s := &Store{
		path: path, guests: guests, log: log, apply: apply, base: base, changed: schedule.NewSignal(),
		uptime: func() time.Duration { return time.Since(start) }, ends: make(map[string]time.Duration),
	}
	s.entries, _, _ = s.read() // a file that cannot be read was refused with the configuration
	return s
}

// clockPause is after how long Run reads the clock again while a request is to end: a timer
// does not count the time for which the system is suspended.
const clockPause = 10 * time.Second

// Run ends requests at their time, until ctx ends.
func (s *Store) Run(ctx context.Context) {
	for schedule.Wait(ctx, s.expire(time.Now()), s.changed) == nil {
		continue
	}
}

// expire ends requests, and returns when to call it again: the zero time if none ends.
func (s *Store) expire(now time.Time) (next time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if left := s.inEffect(now); len(left) < len(s.entries) {
		s.removeEnded(now)
		s.put(left, now)
	}
	for _, e := range s.entries {
		if e.Op == Expose && (next.IsZero() || e.Until.Before(next)) {
			next = e.Until
		}
	}
	if wake := now.Add(clockPause); next.After(wake) {
		next = wake
	}
	return next
}

// removeEnded removes requests that have ended from the file. They have no effect if that fails. A
// file that somebody else changed is read again by the configuration's reload. s.mu is held.
func (s *Store) removeEnded(now time.Time) {
	left := s.inEffect(now)
	list, before, err := s.read()
	if err == nil && !slices.Equal(list, s.entries) {
		return
	}
	if err == nil {
		err = s.replace(before, left)
	}
	ended := slices.DeleteFunc(slices.Clone(s.entries), func(e Entry) bool { return slices.Contains(left, e) })
	if err != nil {
		s.log.Warn("cannot remove requests that have ended; they have no effect", "requests", ended, "err", err)
		return
	}
	s.log.Info("requests have ended, or would end too far ahead; removed", "requests", ended, "longest", rules.MaxExposure)
}

// counts reports whether a request counts at a time. One that exposes does for no longer than
// was left when it was first seen, also if the clock was set back since. s.mu is held.
func (s *Store) counts(e Entry, now time.Time) bool {
	if e.Op != Expose || !e.InEffect(now) {
		return e.Op != Expose
	}
	up := s.uptime()
	maps.DeleteFunc(s.ends, func(_ string, end time.Duration) bool { return end+rules.MaxExposure < up })
	k := e.String() + " " + e.Until.String()
	if _, seen := s.ends[k]; !seen {
		s.ends[k] = up + e.Until.Sub(now.Round(0))
	}
	return up < s.ends[k]
}

// inEffect returns the requests that count at a time. s.mu is held.
func (s *Store) inEffect(now time.Time) []Entry {
	return slices.DeleteFunc(slices.Clone(s.entries), func(e Entry) bool { return !s.counts(e, now) })
}

// put applies the requests of the file. s.mu is held.
func (s *Store) put(list []Entry, now time.Time) {
	s.entries = list
	set, err := s.base.WithRuntime(Rules(s.inEffect(now)))
	if err != nil { // a request that was checked makes a valid rule
		s.log.Error("rules of requests are refused; keeping the previous ones", "err", err)
		return
	}
	s.applied++
	s.apply(set)
	s.changed.Notify()
}

// Generation counts the sets of rules that were applied: while it is the same, so is List.
func (s *Store) Generation() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.applied
}

// Path returns the file, or "" if there is none.
func (s *Store) Path() string { return s.path }

// Reload applies the rules of a configuration that was read again, with the requests of the file
// as it is now. Where that cannot be read, those in effect remain.
func (s *Store) Reload(base *rules.Set) {
	s.mu.Lock()
	defer s.mu.Unlock()
	list, _, err := s.read()
	if err != nil {
		list = s.entries
	}
	s.base = base
	s.put(list, time.Now())
}

// List returns the requests that are in effect, in the order in which they are evaluated.
func (s *Store) List() []Entry {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.inEffect(time.Now())
}

// errChanging is in the error about a file that somebody else writes to.
var errChanging = errors.New("it is being changed by somebody else; try again")

// ErrNoFile is returned where nothing can be requested.
var ErrNoFile = errors.New("no file for requests: set forwardsFile (--forwards-file)")

// Do makes a change: it writes the file, and applies it. What others changed in the file before is
// kept, and comes into effect with it.
func (s *Store) Do(q Request) (Result, error) {
	q, err := q.checked()
	if err == nil {
		err = q.checkSide(s.guests)
	}
	if err == nil && s.path == "" {
		err = ErrNoFile
	}
	if err != nil {
		return Result{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	list, before, err := s.read()
	if err != nil {
		return Result{}, err
	}
	now := time.Now()
	if len(before) == 0 && len(s.inEffect(now)) > 0 {
		return Result{}, fmt.Errorf("%s: empty or removed while its requests are in effect: restore it, or have it read again by SIGHUP or a restart", s.path)
	}
	permitted := s.base.MayAllow
	if q.Op == Expose {
		permitted = s.base.MayExpose
	}
	e := edit{list: list, Result: Result{Removed: []Request{}, Added: []Request{}}}
	if err := e.do(q, now, permitted); err != nil {
		return Result{}, err
	}
	if q.Op == Allow && len(e.Added) == 0 {
		e.Closed = e.closedWithAll(q)
	}
	if len(e.Removed)+len(e.Added) == 0 {
		return e.Result, nil
	}
	if err := s.replace(before, e.list); err != nil {
		return Result{}, err
	}
	s.log.Info("requests changed", "added", e.Added, "removed", e.Removed)
	s.put(e.list, now)
	return e.Result, nil
}

// replace writes the file, unless it is not as it was read any more: then it returns errChanging.
func (s *Store) replace(before []byte, list []Entry) error {
	text := format(list)
	if len(text) > MaxSize {
		return fmt.Errorf("%s would have %d bytes, and may have %d: remove requests, for example by `fairlead forward rm`", s.path, len(text), MaxSize)
	}
	if err := os.MkdirAll(filepath.Dir(s.path), 0o700); err != nil {
		return err
	}
	return trust.ReplaceFile(s.path, text, func() error {
		now, err := readFile(s.path)
		if err == nil && !bytes.Equal(now, before) {
			err = fmt.Errorf("%s: %w", s.path, errChanging)
		}
		return err
	})
}

// read returns the requests of the file, and its bytes.
func (s *Store) read() ([]Entry, []byte, error) {
	if s.path == "" {
		return nil, nil, nil
	}
	data, err := readFile(s.path)
	if err != nil {
		return nil, nil, err
	}
	list, err := Parse(s.path, data, s.guests)
	return list, data, err
}

// readFile reads at most as much as is parsed. A file that is absent is empty.
func readFile(path string) (data []byte, err error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	return io.ReadAll(io.LimitReader(f, MaxSize+1))
}
