// SPDX-License-Identifier: Apache-2.0

package status

import (
	"context"
	"encoding/json"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead/fairlead/internal/config/loglevel"
)

type fixed struct{ list List }

func (f fixed) List() List { return f.list }

func (f fixed) Sources() []Source { return f.list.Sources }

func (f fixed) Changes(ctx context.Context, _ func(Delta) error) error {
	<-ctx.Done()
	return ctx.Err()
}

func serve(s *Server, method, path, body string) (int, string) {
	mux := http.NewServeMux()
	s.routes(mux, true)
	w := httptest.NewRecorder()
	mux.ServeHTTP(w, httptest.NewRequest(method, path, strings.NewReader(body)))
	return w.Code, strings.TrimSpace(w.Body.String())
}

func TestLogLevelGoesBackAfterItsTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var level loglevel.Levels
		s := NewServer(Options{Level: &level, Logger: slog.New(slog.DiscardHandler)})
		expect := func(want slog.Level) {
			t.Helper()
			synctest.Wait()
			if got := level.Level(); got != want {
				t.Fatalf("level %v, want %v", got, want)
			}
		}
		put := func(level, lasts string) {
			t.Helper()
			if code, body := serve(s, http.MethodPut, "/v1/loglevel"+lasts, level); code != http.StatusOK {
				t.Fatalf("%d %s", code, body)
			}
		}
		put("debug", "?for=10m")
		expect(slog.LevelDebug)
		time.Sleep(5 * time.Minute)
		put("error", "?for=10m") // counts anew, and still goes back to what was set for good
		time.Sleep(6 * time.Minute)
		expect(slog.LevelError)
		time.Sleep(5 * time.Minute)
		expect(slog.LevelInfo)
		put("debug", "?for=1m")
		put("warn", "") // for good
		time.Sleep(time.Hour)
		expect(slog.LevelWarn)
		put("debug", "?for=1h")
		put("debug", "?for=2h")
		expect(slog.LevelDebug)
		level.Stop() // no goroutine is left
	})
}

func TestBadLogLevelIsRefused(t *testing.T) {
	var level loglevel.Levels
	s := NewServer(Options{Level: &level, Logger: slog.New(slog.DiscardHandler)})
	for _, c := range []struct{ level, query string }{{"loud", ""}, {"", ""}, {"debug", "?for=x"}, {"debug", "?for=1ms"}, {"debug", "?for=48h"}} {
		if code, body := serve(s, http.MethodPut, "/v1/loglevel"+c.query, c.level); code != http.StatusBadRequest || level.Level() != slog.LevelInfo {
			t.Errorf("%+v: %d %s", c, code, body)
		}
	}
	for body, want := range map[string]string{
		"":                                       "not a request",
		"[]":                                     "not a request",
		`{"level":1}`:                            "not a request",
		`{"level":"debug","lasts":"10m"}`:        "not a request",
		`{"level":"loud"}`:                       "want debug, info",
		`{"level":"debug","components":["nat"]}`: "want a duration",
		`{"level":"debug","components":["nat","tan"],"lasts":60000000000}`:      `component "tan": want one of`,
		`{"level":"debug","components":["` + strings.Repeat("x", 5<<10) + `"]}`: "too large",
	} {
		code, answer := serve(s, http.MethodPut, "/v1/loglevels", body)
		if code != http.StatusBadRequest || !strings.Contains(answer, want) || len(level.State().Temporary) != 0 {
			t.Errorf("%s: %d %s", body, code, answer)
		}
	}
}

func TestLevelsOfComponents(t *testing.T) {
	level := loglevel.New(slog.LevelWarn)
	s := NewServer(Options{Level: level, Logger: slog.New(slog.DiscardHandler)})
	defer level.Stop()
	code, body := serve(s, http.MethodPut, "/v1/loglevels", `{"level":"debug","components":["nat","kube"],"lasts":600000000000}`)
	_, again := serve(s, http.MethodGet, "/v1/loglevels", "")
	var state loglevel.State
	if err := json.Unmarshal([]byte(body), &state); err != nil || code != http.StatusOK || again != body || state.Level != "warn" || len(state.Temporary) != 2 {
		t.Errorf("%d %s, then %s", code, body, again)
	}
	if _, whole := serve(s, http.MethodGet, "/v1/loglevel", ""); whole != "warn" {
		t.Errorf("the whole is at %s", whole)
	}
}

func TestReady(t *testing.T) {
	reason := "a sink has not completed its first sync"
	for _, c := range []struct {
		state string
		ready func() string
		want  int
	}{
		{"starting", nil, http.StatusServiceUnavailable},
		{"live", nil, http.StatusOK},
		{"stale", nil, http.StatusOK}, // it says what it can
		{"live", func() string { return reason }, http.StatusServiceUnavailable},
		{"live", func() string { return "" }, http.StatusOK},
	} {
		s := NewServer(Options{
			Provider: fixed{List{Sources: []Source{{Name: "socket", State: c.state}}}}, Ready: c.ready, Logger: slog.New(slog.DiscardHandler),
		})
		if code, body := serve(s, http.MethodGet, "/readyz", ""); code != c.want {
			t.Errorf("%s: %d %s", c.state, code, body)
		}
	}
}
