// SPDX-License-Identifier: Apache-2.0

package remote

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/run/exec"
	"github.com/fairlead/fairlead/internal/run/policy"
	"github.com/fairlead/fairlead/internal/wire"
)

const (
	// requestTimeout bounds the time between a stream and its request, and to take a refusal.
	requestTimeout = 5 * time.Second
	// What one guest may ask for in a second, and at once. A request costs a line of the log,
	// and one that is granted a copy of the program.
	requestRate, requestBurst = 10, 20
	// maxJobs bounds the programs of all guests, each with a copy of its file in memory.
	maxJobs = 64
	// spare streams are for requests beyond the limit of jobs, which are refused with a reason.
	spare = 16
)

// Options configure a Server. Policy, Jobs and Logger are required.
type Options struct {
	Policy policy.Policy // of policy.ParseHost
	Jobs   int           // of one guest at the same time
	Logger *slog.Logger

	start func(exec.Program) (*exec.Job, error) // exec.Start, but for tests
}

// Server runs programs for guests.
type Server struct {
	opt Options
	all sync.WaitGroup // runs

	mu     sync.Mutex
	guests map[string]*guest
	jobs   int // of all guests
}

// guest is what one guest uses, over all its sessions.
type guest struct {
	requests *rate.Limiter
	refused  rate.Sometimes // lines of the log
	jobs     int            // guarded by Server.mu
}

// New returns a server.
func New(o Options) *Server {
	if o.start == nil {
		o.start = exec.Start
	}
	return &Server{opt: o, guests: make(map[string]*guest)}
}

// Streams is how many streams a guest may have open (link.Options.Runs).
func (s *Server) Streams() int { return s.opt.Jobs + spare }

// Serve serves the streams of a guest's session until it ends. Programs are killed with it, or
// when ctx ends; see Wait.
func (s *Server) Serve(ctx context.Context, name string, session link.Session) {
	for {
		st, err := session.Accept(ctx)
		if err != nil {
			return
		}
		s.all.Go(func() { s.serve(ctx, name, st) })
	}
}

// Wait waits until all programs have gone. No Serve is called any more.
func (s *Server) Wait() { s.all.Wait() }

// serve serves one run.
func (s *Server) serve(ctx context.Context, name string, st link.Stream) {
	defer func() { _ = st.Close() }()
	_ = st.SetDeadline(time.Now().Add(requestTimeout))
	q, err := wire.ReadRunRequest(st)
	if err != nil {
		s.logRefused(name, q, &Refusal{"request", err.Error()})
		_ = st.Reset()
		return
	}
	leave, err := s.enter(name, q)
	if err != nil {
		s.refuse(name, q, st, err)
		return
	}
	s.run(ctx, name, q, st, leave)
}

// refuse tells a guest why nothing is run.
func (s *Server) refuse(name string, q wire.RunRequest, st link.Stream, err error) {
	r, ok := errors.AsType[*Refusal](err)
	if !ok {
		r = &Refusal{"program", err.Error()}
	}
	s.logRefused(name, q, r)
	_ = st.SetDeadline(time.Now().Add(requestTimeout))
	if writeReply(st, Reply{Error: r}) != nil {
		_ = st.Reset()
	}
}

func (s *Server) logRefused(name string, q wire.RunRequest, r *Refusal) {
	s.guest(name).refused.Do(func() {
		s.opt.Logger.Warn("run for a guest refused", "guest", name, "name", q.Name, "from", q.From, "reason", r.Reason, "err", r.Message)
	})
}

// enter decides, and counts a job of the guest until leave is called.
func (s *Server) enter(name string, q wire.RunRequest) (leave func(), err error) {
	g := s.guest(name)
	s.mu.Lock()
	defer s.mu.Unlock()
	if !g.requests.Allow() {
		return nil, &Refusal{"limit", fmt.Sprintf("the guest asks the host more than %d times a second", requestRate)}
	}
	if err := s.allowed(name, q); err != nil {
		return nil, err
	}
	switch {
	case g.jobs >= s.opt.Jobs:
		return nil, &Refusal{"limit", fmt.Sprintf("%d programs of the host run for this guest already", g.jobs)}
	case s.jobs >= maxJobs:
		return nil, &Refusal{"limit", fmt.Sprintf("%d programs of the host run for guests already", s.jobs)}
	}
	g.jobs++
	s.jobs++
	return sync.OnceFunc(func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		g.jobs--
		s.jobs--
	}), nil
}

// guest returns what a guest uses.
func (s *Server) guest(name string) *guest {
	s.mu.Lock()
	defer s.mu.Unlock()
	g := s.guests[name] // as many as the configuration names
	if g == nil {
		g = &guest{requests: rate.NewLimiter(requestRate, requestBurst), refused: rate.Sometimes{Interval: time.Second}}
		s.guests[name] = g
	}
	return g
}

func (s *Server) allowed(name string, q wire.RunRequest) error {
	e := s.opt.Policy.Find(q.Name)
	if e == nil || !e.HasGuest(name) {
		return &Refusal{"policy", fmt.Sprintf("no entry of the host's run.allow lets guest %q run %q", name, q.Name)}
	}
	if err := e.Allows(q.Args, q.Env); err != nil {
		return &Refusal{"policy", fmt.Sprintf("the host's run.allow does not allow this for %q: %v", q.Name, err)}
	}
	return nil
}

// run runs a program that is allowed. It calls leave when nothing is left of it.
func (s *Server) run(ctx context.Context, name string, q wire.RunRequest, st link.Stream, leave func()) {
	log := s.opt.Logger.With("guest", name, "name", q.Name, "args", []string(q.Args), "from", q.From)
	e := s.opt.Policy.Find(q.Name)
	j, err := s.opt.start(exec.Program{Path: e.Path, SHA256: e.SHA256, Args: q.Args, Env: q.Env, Dir: e.Directory})
	if err != nil {
		leave()
		log.Warn("run for a guest", "result", "not started", "err", err)
		_ = st.SetDeadline(time.Now().Add(requestTimeout))
		_ = writeReply(st, Reply{Error: &Refusal{"program", reason(err)}})
		return
	}
	begun := time.Now()
	c := session{stream: st, job: j, leave: leave, wake: make(chan struct{}, 1)}
	how, gone, err := c.serve(ctx)
	log = log.With("seconds", time.Since(begun).Seconds(), "clientGone", gone)
	if err == nil {
		j.Close()
		log.Info("run for a guest", "result", how)
		return
	}
	log.Warn("run for a guest", "result", "unknown", "err", err)
	go func() { // which Wait does not wait for: what cannot be killed may never go
		j.Gone()
		leave()
		j.Close()
	}()
}

// reason is why a program was not started, without paths of the host, which are for its log.
func reason(err error) string {
	if errors.Is(err, exec.ErrChanged) {
		return exec.ErrChanged.Error()
	}
	return "the host cannot start it; its log says why"
}

func writeReply(st link.Stream, r Reply) error {
	return wire.WriteRunFrame(st, Answer, encode(r)[1:])
}
