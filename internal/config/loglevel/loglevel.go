// SPDX-License-Identifier: Apache-2.0

// Package loglevel holds the log levels of a process: one of the whole, and temporary ones
// of components.
package loglevel

import (
	"cmp"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// Limits of how long a temporary level lasts, and how long it does where nothing else is
// asked for and it may not be permanent.
const (
	LastsMin     = time.Second
	LastsMax     = 24 * time.Hour
	LastsDefault = 10 * time.Minute
)

// Names are the names of levels.
func Names() []string { return []string{"debug", "info", "warn", "error"} }

// Name returns the name of a level.
func Name(l slog.Level) string { return strings.ToLower(l.String()) }

// Parse returns the level of a name.
func Parse(name string) (l slog.Level, err error) {
	if !slices.Contains(Names(), name) {
		return 0, fmt.Errorf("log level %q: want debug, info, warn or error", name)
	}
	return l, l.UnmarshalText([]byte(name))
}

// Request asks for a level.
type Request struct {
	Level      string        `json:"level"`                // see Names
	Components []string      `json:"components,omitempty"` // empty: of the whole
	Lasts      time.Duration `json:"lasts,omitempty"`      // in nanoseconds; 0 is for good, of the whole alone
}

// Check returns why r makes no sense.
func (r Request) Check() error {
	if _, err := Parse(r.Level); err != nil {
		return err
	}
	for _, c := range r.Components {
		if !slices.Contains(Components(), c) {
			return fmt.Errorf("component %q: want one of %s", c, strings.Join(Components(), ", "))
		}
	}
	if r.Lasts == 0 && len(r.Components) == 0 {
		return nil
	}
	if r.Lasts < LastsMin || r.Lasts > LastsMax {
		return fmt.Errorf("for %s: want a duration such as 10m, %s to %s", r.Lasts, LastsMin, LastsMax)
	}
	return nil
}

// State is what is in effect.
type State struct {
	Level     string      `json:"level"` // of the whole
	Temporary []Temporary `json:"temporary"`
}

// Temporary is a level that ends.
type Temporary struct {
	Component string    `json:"component,omitempty"` // empty: the whole
	Level     string    `json:"level"`
	Until     time.Time `json:"until"`
}

// Levels are the levels of a process. The zero value has the level info. It must not be
// copied.
type Levels struct {
	now atomic.Pointer[effective] // nil: info alone

	mu        sync.Mutex
	permanent slog.Level        // of the whole
	temporary map[string]*timed // by component; that of the whole by ""
}

// timed is a temporary level. Its timer removes it.
type timed struct {
	level slog.Level
	until time.Time
	timer *time.Timer
}

// effective is what handlers read.
type effective struct {
	whole, least slog.Level
	of           map[string]slog.Level // of components that have one of their own, also where it is that of the whole
}

// New returns levels of which the whole is l.
func New(l slog.Level) *Levels {
	v := new(Levels)
	v.permanent = l
	v.update()
	return v
}

// Level returns that of the whole.
func (v *Levels) Level() slog.Level { return v.current().whole }

func (v *Levels) current() effective {
	if e := v.now.Load(); e != nil {
		return *e
	}
	return effective{}
}

// Set applies a request that was checked, and logs that and its end.
func (v *Levels) Set(r Request, log *slog.Logger) error {
	if err := r.Check(); err != nil {
		return err
	}
	level, _ := Parse(r.Level) // Check did
	keys := r.Components
	if len(keys) == 0 {
		keys = []string{""}
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, k := range keys {
		v.end(k)
		if r.Lasts == 0 {
			v.permanent = level
			continue
		}
		v.begin(k, level, r.Lasts, log)
	}
	v.update()
	log.Info("log level set", append(describe(keys), "level", r.Level, "lasts", r.Lasts)...)
	return nil
}

func describe(keys []string) (attrs []any) {
	if c := strings.Join(keys, ","); c != "" {
		attrs = append(attrs, "components", c)
	}
	return attrs
}

// begin begins a temporary level. v.mu is held.
func (v *Levels) begin(key string, level slog.Level, lasts time.Duration, log *slog.Logger) {
	t := &timed{level: level, until: time.Now().Add(lasts)}
	t.timer = time.AfterFunc(lasts, func() {
		v.mu.Lock()
		defer v.mu.Unlock()
		if v.temporary[key] != t {
			return
		}
		delete(v.temporary, key)
		v.update()
		log.Info("log level restored", append(describe([]string{key}), "level", Name(v.current().level(key)))...)
	})
	if v.temporary == nil {
		v.temporary = make(map[string]*timed)
	}
	v.temporary[key] = t
}

// end ends a temporary level. v.mu is held.
func (v *Levels) end(key string) {
	if t := v.temporary[key]; t != nil {
		t.timer.Stop()
		delete(v.temporary, key)
	}
}

// Stop ends all temporary levels.
func (v *Levels) Stop() {
	v.mu.Lock()
	defer v.mu.Unlock()
	for k := range v.temporary {
		v.end(k)
	}
	v.update()
}

// update has handlers see what is in effect. v.mu is held, or v is new.
func (v *Levels) update() {
	e := effective{whole: v.permanent, of: make(map[string]slog.Level)}
	if t := v.temporary[""]; t != nil {
		e.whole = t.level
	}
	e.least = e.whole
	for _, c := range Components() {
		if t := v.temporary[c]; t != nil {
			e.of[c] = t.level
			e.least = min(e.least, t.level)
		}
	}
	v.now.Store(&e)
}

// level returns that of a component.
func (e effective) level(component string) slog.Level {
	if l, ok := e.of[component]; ok {
		return l
	}
	return e.whole
}

// State returns what is in effect.
func (v *Levels) State() State {
	v.mu.Lock()
	defer v.mu.Unlock()
	s := State{Level: Name(v.current().whole), Temporary: []Temporary{}}
	for k, t := range v.temporary {
		s.Temporary = append(s.Temporary, Temporary{k, Name(t.level), t.until})
	}
	slices.SortFunc(s.Temporary, func(a, b Temporary) int { return cmp.Compare(a.Component, b.Component) })
	return s
}
