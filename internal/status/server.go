// SPDX-License-Identifier: Apache-2.0

package status

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/fairlead/fairlead/internal/config"
	"github.com/fairlead/fairlead/internal/config/forwards"
	"github.com/fairlead/fairlead/internal/config/loglevel"
	"github.com/fairlead/fairlead/internal/config/rules"
	"github.com/fairlead/fairlead/internal/link/conns"
	"github.com/fairlead/fairlead/internal/link/trace"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/names"
	"github.com/fairlead/fairlead/internal/status/version"
)

// Options configures a Server.
type Options struct {
	Provider  Provider
	Explainer Explainer // nil leaves /v1/explain out
	// Ready returns why the process is not ready, or "" if it is. With nil it is
	// ready when every source has reported a complete set.
	Ready    func() string
	Examiner Examiner         // nil leaves /v1/doctor out
	Metrics  http.Handler     // of /metrics; nil leaves it out
	Level    *loglevel.Levels // of the process; nil leaves /v1/loglevel and /v1/loglevels out
	Logger   *slog.Logger
	// MaxWatches bounds concurrent watch and event streams; 64 if 0.
	MaxWatches int
	// Role is "agent" or "host"; Name is the machine's. The page shows both.
	Role, Name string
	// Vitals returns the numbers for the page's charts, with the latencies since mark.
	// With nil the charts are empty.
	Vitals func(mark uint64) Vitals
	// Peers returns the other sides of the link. With nil there are none.
	Peers func() []Peer
	// Rules returns the current rules; nil leaves /v1/rules out.
	Rules func() *rules.Set
	// Forwards changes the rules that are added at run time; nil leaves /v1/forwards out.
	Forwards *forwards.Store
	// Demands returns why a port that a rule asks for by name is not there; none if it is, or is
	// being looked for. It is nil on a host, which asks for none.
	Demands func(d port.Demand) port.Reason
	// Names returns the names of ports; nil leaves /v1/names out.
	Names func() names.Report
	// Settings returns the configuration in effect; nil leaves /v1/config out.
	Settings   func() []config.Setting
	ConfigFile string // from which it was read; empty for none
	// Tokens are those of the page on TCP. If they are empty, new ones are made.
	Tokens PageTokens
	// Container returns the container of a process by its cgroups, and fails closed; nil leaves
	// /v1/whois out.
	Container func(cgroups []string) (port.Owner, error)
	// Trace reports flows; nil leaves /v1/trace out.
	Trace *trace.Hub
}

// Server serves the control socket, and metrics and the page on TCP.
type Server struct {
	o       Options
	watches chan struct{}
	hello   hello
	tokens  PageTokens   // of the page on TCP
	web     atomic.Value // WebAddress: where the page is
}

// NewServer returns a server. It starts nothing.
func NewServer(o Options) *Server {
	if o.MaxWatches == 0 {
		o.MaxWatches = 64
	}
	return &Server{
		o: o, watches: make(chan struct{}, o.MaxWatches), tokens: cmp.Or(o.Tokens, newTokens()),
		hello: hello{Role: o.Role, Name: o.Name, Version: version.String(), Explains: o.Explainer != nil, Names: o.Names != nil},
	}
}

// Limits against slow and oversized peers.
const (
	headerTimeout = 5 * time.Second
	idleTimeout   = 60 * time.Second
	writeTimeout  = 10 * time.Second
	maxHeader     = 16 << 10
	maxBody       = 4 << 10

	// Of the connections of one listener; see conns.Set.
	maxConns        = 256
	maxSilent       = 64
	maxSilentScarce = 4
)

// Serve serves l until ctx ends, and closes it. The control socket has all routes; a
// listener for metrics has /metrics, /healthz and /readyz.
func (s *Server) Serve(ctx context.Context, l net.Listener, control bool) error {
	mux := http.NewServeMux()
	s.routes(mux, control)
	if !control {
		return s.serve(ctx, l, mux)
	}
	if s.o.Level != nil {
		defer s.o.Level.Stop()
	}
	pageRoutes(mux)
	return s.serve(ctx, l, guard(tunnelled(mux)))
}

func (s *Server) serve(ctx context.Context, l net.Listener, h http.Handler) error {
	c := conns.Set{Most: maxConns, Silent: maxSilent, SilentScarce: maxSilentScarce}
	srv := &http.Server{
		Handler:           c.Handler(h),
		ReadHeaderTimeout: headerTimeout,
		ReadTimeout:       idleTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    maxHeader,
		BaseContext:       func(net.Listener) context.Context { return ctx },
		ConnContext:       conns.WithConn,
		ConnState:         c.Changed,
		ErrorLog:          slog.NewLogLogger(s.o.Logger.Handler(), slog.LevelDebug),
	}
	stop := context.AfterFunc(ctx, func() { _ = srv.Close() })
	defer stop()
	err := srv.Serve(c.Limit(l))
	if errors.Is(err, http.ErrServerClosed) && ctx.Err() != nil {
		return ctx.Err()
	}
	return fmt.Errorf("serve %s: %w", l.Addr(), err)
}

func (s *Server) routes(mux *http.ServeMux, control bool) {
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { text(w, http.StatusOK, "ok") })
	mux.HandleFunc("GET /readyz", s.ready)
	if s.o.Metrics != nil {
		mux.Handle("GET /metrics", s.o.Metrics)
	}
	if !control {
		return
	}
	s.webRoutes(mux)
	mux.HandleFunc("GET /v1/watch", s.watch)
	mux.HandleFunc("GET /v1/web", s.webAddress)
	if s.o.Trace != nil {
		mux.HandleFunc("GET /v1/trace", s.trace)
	}
	if s.o.Settings != nil {
		mux.HandleFunc("GET /v1/config", s.showSettings)
	}
	if s.o.Rules != nil {
		mux.HandleFunc("POST /v1/rules", s.testRules)
	}
	if s.o.Container != nil {
		mux.HandleFunc("POST /v1/whois", s.whois)
	}
	if s.o.Examiner != nil {
		mux.HandleFunc("GET /v1/doctor", s.examine)
	}
	if s.o.Level != nil {
		mux.HandleFunc("GET /v1/loglevel", s.logLevel)
		mux.HandleFunc("PUT /v1/loglevel", s.setLevel)
		mux.HandleFunc("GET /v1/loglevels", s.logLevels)
		mux.HandleFunc("PUT /v1/loglevels", s.setLevels)
	}
}

func text(w http.ResponseWriter, code int, line string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.WriteHeader(code)
	_, _ = fmt.Fprintln(w, line)
}

func (s *Server) list(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(writeTimeout))
	l := s.o.Provider.List()
	l.Role, l.Version, l.Peers = s.o.Role, version.String(), s.peers()
	_ = json.NewEncoder(w).Encode(l)
}

// peers returns the other sides of the link, never nil.
func (s *Server) peers() []Peer {
	if s.o.Peers == nil {
		return []Peer{}
	}
	return append([]Peer{}, s.o.Peers()...)
}

// enter admits a stream, or refuses it.
func (s *Server) enter(w http.ResponseWriter) bool {
	select {
	case s.watches <- struct{}{}:
		return true
	default:
		text(w, http.StatusTooManyRequests, fmt.Sprintf("too many watches (limit %d): end one first", s.o.MaxWatches))
		return false
	}
}

func (s *Server) leave() { <-s.watches }

// watch streams events as JSON lines until the client disconnects.
func (s *Server) watch(w http.ResponseWriter, r *http.Request) {
	if !s.enter(w) {
		return
	}
	defer s.leave()
	w.Header().Set("Content-Type", "application/jsonl")
	rc := http.NewResponseController(w)
	_ = rc.SetReadDeadline(time.Time{})
	enc := json.NewEncoder(w)
	t := newTracker()
	err := s.o.Provider.Changes(r.Context(), func(d Delta) error {
		_ = rc.SetWriteDeadline(time.Now().Add(writeTimeout))
		for _, e := range t.events(d, time.Now()) {
			if err := enc.Encode(e); err != nil {
				return err
			}
		}
		return rc.Flush()
	})
	if err != nil && r.Context().Err() == nil {
		s.o.Logger.Debug("watch ended", "err", err)
	}
}
