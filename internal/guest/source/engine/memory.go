// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"strings"
	"time"

	"github.com/fairlead/fairlead/internal/config/trust"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/schedule"
)

// memoryVersion is the version of the file's format. Another one is not read.
const memoryVersion = 1

// maxMemory bounds the file, in bytes: some 20,000 containers.
const maxMemory = 16 << 20

// Between two writes there is at least savePause, and writing takes at most one part in
// saveShare of the time.
const (
	savePause = time.Second
	saveShare = 50
)

// Memory is the path of a file that keeps what an engine is known by, for an agent that
// starts while the engine is away: rules that name an owner need it. It should be in the
// runtime directory; the next boot does not use it. "" keeps nothing.
type Memory string

// Saved is what a Memory keeps.
type Saved struct {
	// Listed is set once the engine has been listed, by sources that do not know which
	// of its objects run.
	Listed bool
	// Facts are of running containers, by object.
	Facts map[string]Fact
}

// memoryFile is the content of the file.
type memoryFile struct {
	Version int                 `json:"version"`
	Boot    string              `json:"boot"`
	Listed  bool                `json:"listed,omitempty"`
	Facts   map[string]keptFact `json:"facts,omitempty"`
}

// keptFact is a Fact in the file.
type keptFact struct {
	Owner     port.Owner   `json:"owner"`
	ID        string       `json:"id,omitempty"`
	Cgroup    uint64       `json:"cgroup,omitempty"`
	Path      string       `json:"path,omitempty"`
	User      uint32       `json:"user,omitempty"`
	Addresses []netip.Addr `json:"addresses,omitempty"`
}

// Load returns what was saved last during this boot; the zero value if there is
// nothing, or with an error. A file that others can change is not believed.
func (m Memory) Load() (Saved, error) {
	if m == "" {
		return Saved{}, nil
	}
	b, err := trust.ReadFile(string(m), maxMemory)
	if errors.Is(err, fs.ErrNotExist) {
		return Saved{}, nil
	}
	var s Saved
	if err == nil {
		s, err = decode(b)
	}
	if err != nil {
		return Saved{}, fmt.Errorf("read what is known of containers from %s: %w", m, err)
	}
	return s, nil
}

// decode returns what is saved in a file of this boot.
func decode(b []byte) (Saved, error) {
	var f memoryFile
	if err := json.Unmarshal(b, &f); err != nil {
		return Saved{}, err
	}
	if f.Boot != bootID() {
		return Saved{}, nil
	}
	if f.Version != memoryVersion {
		return Saved{}, fmt.Errorf("version %d of the file: want %d", f.Version, memoryVersion)
	}
	out := Saved{Listed: f.Listed, Facts: make(map[string]Fact, len(f.Facts))}
	for object, k := range f.Facts {
		if k.valid() {
			out.Facts[object] = Fact{Owner: k.Owner, ID: k.ID, Cgroup: k.Cgroup, Path: k.Path, User: k.User, Addresses: k.Addresses}
		}
	}
	return out, nil
}

// valid reports whether a fact is of a container and can be looked for.
func (k keptFact) valid() bool {
	for _, a := range k.Addresses {
		if !a.IsValid() || a.IsLoopback() || a.IsUnspecified() {
			return false
		}
	}
	return k.Owner.Kind == port.OwnerContainer && k.Owner.ID != "" && (k.Path == "" || strings.HasPrefix(k.Path, "/"))
}

// Save replaces what was saved, atomically. Nothing is kept in no file.
func (m Memory) Save(s Saved) error {
	if m == "" {
		return nil
	}
	if !s.Listed && len(s.Facts) == 0 {
		if err := os.Remove(string(m)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		return nil
	}
	f := memoryFile{Version: memoryVersion, Boot: bootID(), Listed: s.Listed, Facts: make(map[string]keptFact, len(s.Facts))}
	for object, v := range s.Facts {
		if !v.Stopped {
			f.Facts[object] = keptFact{v.Owner, v.ID, v.Cgroup, v.Path, v.User, v.Addresses}
		}
	}
	b, err := json.Marshal(f)
	if err != nil {
		return err
	}
	if len(b) > maxMemory {
		return fmt.Errorf("%d containers take %d bytes: want at most %d", len(f.Facts), len(b), maxMemory)
	}
	return trust.WriteFile(string(m), b)
}

// bootID tells boots of the machine apart, "" where the kernel does not.
func bootID() string {
	b, _ := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return strings.TrimSpace(string(b))
}

// keep saves what t knows after each change, until ctx ends, and then once more. A failed
// save is repeated.
func (m Memory) keep(ctx context.Context, t *Table, log *slog.Logger) {
	failed := false
	for ended := m == ""; !ended; {
		select {
		case <-ctx.Done():
			ended = true
		case <-t.changed():
		}
		began := time.Now()
		err := m.Save(Saved{Facts: t.all()})
		if err != nil {
			t.changed().Notify()
		}
		if err != nil && !failed {
			log.Warn("cannot save which containers run; rules by owner fail open if the agent starts again while the engine is away",
				"err", err)
		}
		failed = err != nil
		_ = schedule.Sleep(ctx, max(savePause, schedule.Rest(time.Since(began), saveShare)))
	}
}

// changed receives after facts have changed.
func (t *Table) changed() schedule.Signal {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.change == nil {
		t.change = schedule.NewSignal()
	}
	return t.change
}

// all returns all facts.
func (t *Table) all() map[string]Fact {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return maps.Clone(t.objects)
}

// Remember takes in what an earlier agent knew of containers that still run, and saves
// what is known until ctx ends. It reports whether there are any. wait returns when
// nothing is saved any more. Call it before the first session.
func (s *Set) Remember(ctx context.Context, m Memory) (known bool, wait func()) {
	saved, err := m.Load()
	if err != nil {
		s.Logger.Warn("cannot read the containers saved by the previous agent", "err", err)
	}
	runs := s.Host.running(saved.Facts)
	maps.DeleteFunc(saved.Facts, func(_ string, f Fact) bool { return !runs(f) })
	s.Facts.changed() // make it, before the first change
	s.Facts.Swap(nil, saved.Facts)
	done := make(chan struct{})
	go func() {
		defer close(done)
		m.keep(ctx, s.Facts, s.Logger)
	}()
	return len(saved.Facts) > 0, func() { <-done }
}
