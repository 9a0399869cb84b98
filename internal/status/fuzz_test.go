// SPDX-License-Identifier: Apache-2.0

package status

import (
	"context"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/config"
	"github.com/fairlead/fairlead/internal/config/loglevel"
	"github.com/fairlead/fairlead/internal/config/rules"
	"github.com/fairlead/fairlead/internal/status/explain"
)

type explained struct{}

func (explained) Explain(_ context.Context, q explain.Query) (explain.Report, error) {
	if q.Port == 0 {
		panic("a query without a port")
	}
	return explain.Report{}, nil
}

// Requests on the control socket: none makes the server fail, and none is accepted that
// has another method than its route.
func FuzzRequest(f *testing.F) {
	for _, c := range [][3]string{
		{"GET", "/v1/ports", ""},
		{"GET", "/v1/explain?port=8080/tcp", ""},
		{"POST", "/v1/explain?port=53/udp", ""},
		{"GET", "/v1/watch?resume=1", ""},
		{"PUT", "/v1/loglevel", "debug 10m"},
		{"PUT", "/v1/loglevels", `{"level":"debug","components":["nat"],"lasts":600000000000}`},
		{"POST", "/v1/rules", `{"protocol":"tcp","address":"0.0.0.0","port":80,"source":"nat","owner":{"kind":"container","name":"web","labels":{"a":"b"}}}`},
		{"POST", "/v1/forwards", `{"op":"forward","protocol":"tcp","port":8080,"to":18080,"bind":"loopback","guest":"dev"}`},
		{"POST", "/v1/forwards", `{"op":"deny","owner":"a\"}"}`},
		{"GET", "/v1/forwards", ""},
		{"GET", "/v1/config", ""},
		{"GET", "/readyz", ""},
	} {
		f.Add(c[0], c[1], c[2])
	}
	set, err := rules.New(rules.Loopback(), []rules.Rule{{Match: rules.Match{Name: "secret*"}, Deny: true}})
	if err != nil {
		f.Fatal(err)
	}
	var level loglevel.Levels
	server := NewServer(Options{
		Provider: fixed{}, Level: &level, Logger: slog.New(slog.DiscardHandler), Explainer: explained{},
		Rules: func() *rules.Set { return set }, Settings: func() []config.Setting { return nil }, Forwards: noForwards(f),
	})
	f.Cleanup(level.Stop)
	mux := http.NewServeMux()
	server.routes(mux, true)
	h := guard(mux)
	f.Fuzz(func(t *testing.T, method, target, body string) {
		u, err := url.ParseRequestURI(target)
		if err != nil {
			return
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond) // of streams
		defer cancel()
		r := (&http.Request{
			Method: method, URL: u, Host: "localhost", Header: http.Header{}, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		}).WithContext(ctx)
		r.Body = http.NoBody
		if body != "" {
			r = r.Clone(ctx)
			r.Body = httptest.NewRequest(http.MethodPost, "/", strings.NewReader(body)).Body
		}
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		switch {
		case w.Code >= http.StatusInternalServerError && w.Code != http.StatusServiceUnavailable:
			t.Errorf("%s %q %q: %d %q", method, target, body, w.Code, w.Body)
		case w.Code == http.StatusOK && method != http.MethodGet && method != http.MethodHead && method != http.MethodPost && method != http.MethodPut:
			t.Errorf("%s %q is served", method, target)
		}
	})
}
