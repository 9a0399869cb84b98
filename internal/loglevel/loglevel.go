// SPDX-License-Identifier: Apache-2.0

// Package loglevel holds the log levels of a process: one of the whole, and temporary ones
// of components, which the user of this machine and the host at the other end of the link
// set independently.
package loglevel

import (
	"cmp"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"
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

// CheckMore returns why a host may not ask this of a guest: it asks for more lines only,
// and for a time.
func (r Request) CheckMore() error {
	if r.Level != "debug" && r.Level != "info" {
		return fmt.Errorf("log level %q of a guest: want debug or info, as a host only has an agent log more", r.Level)
	}
	if r.Lasts < LastsMin || r.Lasts > LastsMax {
		return fmt.Errorf("for %s: want a duration such as 10m, %s to %s", r.Lasts, LastsMin, LastsMax)
	}
	return nil
}

// Party is who set a level.
type Party int

// The parties. What one sets, the other one can neither change nor end.
const (
	Local Party = iota // a user of this machine
	Host               // the host at the other end of the link: only for a time, and only for more lines
	parties
)

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
	ByHost    bool      `json:"byHost,omitempty"`
}

// Levels are the levels of a process. The zero value has the level info. It must not be
// copied.
type Levels struct {
	now atomic.Pointer[effective] // nil: info alone

	mu        sync.Mutex
	permanent slog.Level // of the whole
	temporary [parties]map[string]*timed
	extra     *rate.Limiter // of the lines that only the host asked for
}

// timed is a temporary level. Its timer removes it.
type timed struct {
	level slog.Level
	until time.Time
	timer *time.Timer
}

// What is logged for the host alone, in lines a second and at once: it could fill the disk of
// the guest otherwise.
const extraRate, extraBurst = 100, 1000

// effective is what handlers read.
type effective struct {
	whole, least slog.Level
	of           map[string]slog.Level // of components that have one of their own, also where it is that of the whole
	local        *effective            // without what the host set; nil if that is nothing
	extra        *rate.Limiter
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
func (v *Levels) Set(by Party, r Request, log *slog.Logger) error {
	if err := r.Check(); err != nil {
		return err
	}
	if by == Host {
		if err := r.CheckMore(); err != nil {
			return err
		}
	}
	level, _ := Parse(r.Level) // Check did
	keys := r.Components
	if len(keys) == 0 {
		keys = []string{""}
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, k := range keys {
		v.end(by, k)
		if r.Lasts == 0 {
			v.permanent = level
			continue
		}
		v.begin(by, k, level, r.Lasts, log)
	}
	v.update()
	log.Info("log level set", append(describe(by, keys), "level", r.Level, "lasts", r.Lasts)...)
	return nil
}

func describe(by Party, keys []string) (attrs []any) {
	if c := strings.Join(keys, ","); c != "" {
		attrs = append(attrs, "components", c)
	}
	if by == Host {
		attrs = append(attrs, "by", "host")
	}
	return attrs
}

// begin begins a temporary level. v.mu is held.
func (v *Levels) begin(by Party, key string, level slog.Level, lasts time.Duration, log *slog.Logger) {
	t := &timed{level: level, until: time.Now().Add(lasts)}
	t.timer = time.AfterFunc(lasts, func() {
		v.mu.Lock()
		defer v.mu.Unlock()
		if v.temporary[by][key] != t {
			return
		}
		delete(v.temporary[by], key)
		v.update()
		log.Info("log level restored", append(describe(by, []string{key}), "level", Name(v.current().level(key)))...)
	})
	if v.temporary[by] == nil {
		v.temporary[by] = make(map[string]*timed)
	}
	v.temporary[by][key] = t
}

// end ends a temporary level. v.mu is held.
func (v *Levels) end(by Party, key string) {
	if t := v.temporary[by][key]; t != nil {
		t.timer.Stop()
		delete(v.temporary[by], key)
	}
}

// Stop ends all temporary levels.
func (v *Levels) Stop() {
	v.mu.Lock()
	defer v.mu.Unlock()
	for by := range parties {
		for k := range v.temporary[by] {
			v.end(by, k)
		}
	}
	v.update()
}

// update has handlers see what is in effect. v.mu is held, or v is new.
func (v *Levels) update() {
	local := v.join(nil)
	e := local
	if host := v.temporary[Host]; len(host) > 0 {
		if v.extra == nil {
			v.extra = rate.NewLimiter(extraRate, extraBurst)
		}
		e = v.join(host)
		e.local, e.extra = &local, v.extra
	}
	v.now.Store(&e)
}

// join returns what the local levels and the host's make together.
func (v *Levels) join(host map[string]*timed) effective {
	of := func(levels map[string]*timed, key string, otherwise slog.Level) slog.Level {
		if t := levels[key]; t != nil {
			return t.level
		}
		return otherwise
	}
	local := v.temporary[Local]
	whole, more := of(local, "", v.permanent), of(host, "", math.MaxInt)
	e := effective{whole: min(whole, more), of: make(map[string]slog.Level)}
	e.least = e.whole
	for _, c := range Components() {
		if local[c] != nil || host[c] != nil {
			e.of[c] = min(of(local, c, whole), of(host, c, more))
			e.least = min(e.least, e.of[c])
		}
	}
	return e
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
	for by := range parties {
		for k, t := range v.temporary[by] {
			s.Temporary = append(s.Temporary, Temporary{k, Name(t.level), t.until, by == Host})
		}
	}
	slices.SortFunc(s.Temporary, func(a, b Temporary) int {
		return cmp.Or(cmp.Compare(a.Component, b.Component), a.Until.Compare(b.Until))
	})
	return s
}
