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
	"strings"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/rules"
	"github.com/fairlead/fairlead/internal/schedule"
	"github.com/fairlead/fairlead/internal/trust"
	"github.com/fairlead/fairlead/internal/yamltree"
)

// Store changes the file of rules of a running agent or host, and has them applied.
type Store struct {
	path   string // empty for none
	guests bool   // rules may name guests
	log    *slog.Logger
	apply  func(*rules.Set)

	uptime func() time.Duration // of this process; unlike the clock nobody sets it

	mu      sync.Mutex
	base    *rules.Set               // of the configuration
	current *rules.Set               // applied last
	applied uint64                   // how often a set was applied
	changed schedule.Signal          // for Run: another set is applied
	stale   bool                     // the file was read again, and may have rules that have ended
	refused error                    // why the configuration that was read last is not in effect
	ends    map[string]time.Duration // uptime at which a rule that exposes ends, by its name and end
}

// NewStore returns a store of the file at path, which may be absent; an empty path is none.
// Base is the rules of the configuration. Guests says that this is a host, where rules may
// name guests. Apply is called with each new set of rules, one call at a time.
func NewStore(path string, base *rules.Set, guests bool, log *slog.Logger, apply func(*rules.Set)) *Store {
	start := time.Now()
	return &Store{
		path: path, guests: guests, log: log, apply: apply, base: base, current: base, changed: schedule.NewSignal(),
		uptime: func() time.Duration { return time.Since(start) }, ends: make(map[string]time.Duration),
	}
}

// clockPause is after how long Run reads the clock again while a rule is to end: a timer
// does not count the time for which the system is suspended.
const clockPause = 10 * time.Second

// Run ends rules at their time, until ctx ends.
func (s *Store) Run(ctx context.Context) {
	if s.path == "" {
		return
	}
	s.clean(time.Now()) // what ended before the start
	for {
		if schedule.Wait(ctx, s.expire(time.Now()), s.changed) != nil {
			return
		}
	}
}

// expire ends rules, and returns when to call it again: the zero time if no rule ends.
func (s *Store) expire(now time.Time) time.Time {
	s.mu.Lock()
	set, next := s.current.InEffect(func(r rules.Rule) bool { return s.counts(r, now) })
	ended, stale := set != s.current, s.stale
	s.stale = false
	if ended {
		s.put(set)
	}
	s.mu.Unlock()
	if ended || stale {
		s.clean(now)
	}
	if wake := now.Add(clockPause); next.After(wake) {
		next = wake
	}
	return next
}

// counts reports whether a rule counts at a time. One that exposes does for no longer than
// was left when it was first seen, also if the clock was set back since. s.mu is held.
func (s *Store) counts(r rules.Rule, now time.Time) bool {
	if !r.Exposes() || !r.InEffect(now) {
		return !r.Exposes()
	}
	up := s.uptime()
	maps.DeleteFunc(s.ends, func(_ string, end time.Duration) bool { return end+rules.MaxExposure < up })
	k := r.Name + " " + r.Until.String()
	if _, seen := s.ends[k]; !seen {
		s.ends[k] = up + r.Until.Sub(now.Round(0))
	}
	return up < s.ends[k]
}

// inEffect returns those of a list of rules that count at a time. s.mu is held.
func (s *Store) inEffect(list []rules.Rule, now time.Time) []rules.Rule {
	return slices.DeleteFunc(slices.Clone(list), func(r rules.Rule) bool { return !s.counts(r, now) })
}

// clean removes rules that have ended from the file. They have no effect if that fails.
func (s *Store) clean(now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for range attempts {
		d, before, err := s.read()
		if err != nil {
			return // the configuration's reload reports it
		}
		next, ended, err := d.withoutEnded(func(r rules.Rule) bool { return s.counts(r, now) })
		if err == nil && len(ended) == 0 {
			return
		}
		var again bool
		if err == nil {
			again, err = s.replace(before, []byte(next.text))
		}
		if err != nil {
			s.log.Warn("cannot remove run-time rules that have ended; they have no effect", "rules", ended, "err", err)
			return
		}
		if !again {
			s.log.Info("run-time rules have ended, or would end too far ahead; removed", "rules", ended, "longest", rules.MaxExposure)
			return
		}
	}
}

// put applies a set. s.mu is held.
func (s *Store) put(set *rules.Set) {
	s.current = set
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

// Reload applies the rules of a configuration that was read again, with those of the file
// as it is now. Where that cannot be read, those that base has remain.
func (s *Store) Reload(base *rules.Set) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.base, s.refused = base, nil
	now := time.Now()
	if s.path != "" {
		if d, _, err := s.read(); err == nil {
			if set, err := base.WithRuntime(s.inEffect(d.rules, now)); err == nil {
				base = set
			}
		}
	}
	base, _ = base.InEffect(func(r rules.Rule) bool { return s.counts(r, now) })
	s.stale = true
	s.put(base)
}

// List returns the rules of the file, in the order in which they are evaluated.
func (s *Store) List() ([]rules.Rule, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.list()
}

// list is List. s.mu is held.
func (s *Store) list() ([]rules.Rule, error) {
	if s.path == "" {
		return nil, nil
	}
	d, _, err := s.read()
	return s.inEffect(d.rules, time.Now()), err
}

// Refuse keeps what is in effect although the configuration was read again, and the reason.
func (s *Store) Refuse(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.refused = err
}

// Entry is a rule of the file, or in effect.
type Entry struct {
	rules.Rule
	Off    bool   // it is in the file, but not in effect
	Differ string // why the file and what is in effect differ about it; empty if they do not
}

// Entries returns the rules of the file, in the order in which they are evaluated, and then
// those that are in effect and not in the file.
func (s *Store) Entries() (list []Entry, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	inFile, err := s.list()
	if err != nil {
		return nil, err
	}
	left, why := s.inEffect(s.current.Runtime(), time.Now()), "until the configuration is read again"
	if s.refused != nil {
		why = "because the configuration was refused: " + strings.ReplaceAll(s.refused.Error(), "\n", "; ")
	}
	for _, r := range inFile {
		e := Entry{Rule: r}
		if i := slices.IndexFunc(left, func(o rules.Rule) bool { return equal(o, r) }); i >= 0 {
			left = slices.Delete(left, i, i+1)
		} else {
			e.Off, e.Differ = true, "not in effect, "+why
		}
		list = append(list, e)
	}
	for _, r := range left {
		list = append(list, Entry{Rule: r, Differ: "not in the file any more, but in effect, " + why})
	}
	return list, nil
}

// Result is what a change did. It is empty if there was nothing to do.
type Result struct {
	Removed []string `json:"removed"` // names of rules
	Added   []string `json:"added"`
	// Closed says, of what was to be allowed and was not added, why it is closed all the same.
	Closed string `json:"closed,omitempty"`
}

// ErrChanging is in the error about a file that somebody else writes to.
var ErrChanging = errors.New("it is being changed by somebody else; try again")

// ErrNoFile is returned where no rules can be added.
var ErrNoFile = errors.New("no file for such rules: set forwardsFile (--forwards-file)")

// attempts is how often a change is made anew to a file that was changed meanwhile.
const attempts = 3

// Do makes a change: it writes the file, and applies it. What others change in the file
// meanwhile is kept.
func (s *Store) Do(q Request) (Result, error) {
	q, err := q.normal()
	if err == nil {
		err = q.validate()
	}
	if err != nil {
		return Result{}, err
	}
	switch {
	case s.path == "":
		return Result{}, ErrNoFile
	case q.Guest != "" && !s.guests:
		return Result{}, errors.New("an agent has no guests: run this on the host, or without --guest")
	}
	switch {
	case s.guests:
	case q.OnConflict != "":
		return Result{}, errors.New("only a host opens another port on a conflict: run this on the host")
	case q.Op == Expose:
		return Result{}, errors.New("only a host opens ports to other machines: run this on the host")
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for range attempts {
		r, again, err := s.try(q)
		if err != nil || !again {
			return r, err
		}
	}
	return Result{}, fmt.Errorf("%s: %w", s.path, ErrChanging)
}

// try makes a change unless the file is changed meanwhile.
func (s *Store) try(q Request) (_ Result, again bool, err error) {
	d, before, err := s.read()
	if err != nil {
		return Result{}, false, err
	}
	if len(before) == 0 && s.current.RuntimeLen() > 0 {
		return Result{}, false, fmt.Errorf("%s: empty or removed while its rules are in effect: restore it, or have it read again by SIGHUP or a restart", s.path)
	}
	now, permitted := time.Now(), s.base.MayAllow
	if q.Op == Expose {
		permitted = s.base.MayExpose
	}
	next, removed, added, err := q.change(d, now, permitted)
	if err != nil {
		return Result{}, false, err
	}
	r := Result{Removed: append([]string{}, removed...), Added: append([]string{}, added...)}
	if q.Op == Allow && len(added) == 0 {
		r.Closed = q.closedWithAll(next)
	}
	set, err := s.base.WithRuntime(s.inEffect(next.rules, now))
	if err != nil || len(removed)+len(added) == 0 {
		return r, false, err
	}
	if again, err := s.replace(before, []byte(next.text)); again || err != nil {
		return r, again, err
	}
	s.log.Info("run-time rules changed", "added", added, "removed", removed)
	s.put(set)
	return r, false, nil
}

// replace writes the file, unless it is not as it was read any more: then it reports changed.
func (s *Store) replace(before, text []byte) (changed bool, err error) {
	if err := os.MkdirAll(filepath.Dir(s.path), 0o700); err != nil {
		return false, err
	}
	if now, err := readFile(s.path); err != nil || !bytes.Equal(now, before) {
		return err == nil, err
	}
	return false, trust.WriteFile(s.path, text)
}

// read returns the file, and its bytes.
func (s *Store) read() (document, []byte, error) {
	data, err := readFile(s.path)
	if err != nil {
		return document{}, nil, err
	}
	d, err := parse(s.path, string(data))
	if err == nil { // as at the start: an agent with such a rule would not start again
		if err = rules.CheckSide(s.guests, InEffect(d.rules, time.Now())); err != nil {
			err = fmt.Errorf("%s: %w", s.path, err)
		}
	}
	return d, data, err
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
	return io.ReadAll(io.LimitReader(f, yamltree.MaxSize+1))
}
