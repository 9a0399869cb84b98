// SPDX-License-Identifier: Apache-2.0

package status

import (
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"time"
)

// ready serves /readyz.
func (s *Server) ready(w http.ResponseWriter, _ *http.Request) {
	reason := ""
	for _, src := range s.o.Provider.Sources() {
		if src.State == "starting" {
			reason = "source " + src.Name + " is starting"
		}
	}
	if s.o.Ready != nil {
		reason = s.o.Ready()
	}
	if reason != "" {
		text(w, http.StatusServiceUnavailable, reason)
		return
	}
	text(w, http.StatusOK, "ready")
}

// Limits of how long a temporary log level lasts.
const (
	LevelLastsMin = time.Second
	LevelLastsMax = 24 * time.Hour
)

// levelTimer restores the permanent log level after a temporary one.
type levelTimer struct {
	mu    sync.Mutex
	timer *time.Timer
	back  slog.Level
}

// set sets the level, permanently if lasts is 0.
func (t *levelTimer) set(v *slog.LevelVar, l slog.Level, lasts time.Duration, log *slog.Logger) {
	t.mu.Lock()
	defer t.mu.Unlock()
	before := v.Level()
	if t.timer != nil {
		t.timer.Stop()
		t.timer, before = nil, t.back
	}
	v.Set(l)
	log.Info("log level set", "level", levelName(l), "lasts", lasts)
	if lasts == 0 {
		return
	}
	t.back = before
	var own *time.Timer
	own = time.AfterFunc(lasts, func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		if t.timer == own {
			t.timer = nil
			v.Set(before)
			log.Info("log level restored", "level", levelName(before))
		}
	})
	t.timer = own
}

func (t *levelTimer) stop() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.timer != nil {
		t.timer.Stop()
		t.timer = nil
	}
}

func levelName(l slog.Level) string { return strings.ToLower(l.String()) }

func (s *Server) setLevel(w http.ResponseWriter, r *http.Request) {
	var l slog.Level
	b, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	name := strings.TrimSpace(string(b))
	if err != nil || l.UnmarshalText([]byte(name)) != nil {
		text(w, http.StatusBadRequest, fmt.Sprintf("log level %q: want debug, info, warn or error", name))
		return
	}
	var lasts time.Duration
	if v := r.URL.Query().Get("for"); v != "" {
		if lasts, err = time.ParseDuration(v); err != nil || lasts < LevelLastsMin || lasts > LevelLastsMax {
			text(w, http.StatusBadRequest, fmt.Sprintf("for %q: want a duration such as 10m, %s to %s", v, LevelLastsMin, LevelLastsMax))
			return
		}
	}
	s.level.set(s.o.Level, l, lasts, s.o.Logger)
	text(w, http.StatusOK, levelName(l))
}
