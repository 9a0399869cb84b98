// SPDX-License-Identifier: Apache-2.0

package status

import (
	"context"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"
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
		var level slog.LevelVar
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
		s.level.stop() // no goroutine is left
	})
}

func TestBadLogLevelIsRefused(t *testing.T) {
	var level slog.LevelVar
	s := NewServer(Options{Level: &level, Logger: slog.New(slog.DiscardHandler)})
	for _, c := range []struct{ level, query string }{{"loud", ""}, {"", ""}, {"debug", "?for=x"}, {"debug", "?for=1ms"}, {"debug", "?for=48h"}} {
		if code, body := serve(s, http.MethodPut, "/v1/loglevel"+c.query, c.level); code != http.StatusBadRequest || level.Level() != slog.LevelInfo {
			t.Errorf("%+v: %d %s", c, code, body)
		}
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
