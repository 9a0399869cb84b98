// SPDX-License-Identifier: Apache-2.0

//go:build linux

package refused

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/fairlead/fairlead/internal/guest/kernel"
	"github.com/fairlead/fairlead/internal/guest/sink/listener"
	"github.com/fairlead/fairlead/internal/port/schedule"
)

const (
	// readyTimeout is how long the start of the sources may delay the hook.
	readyTimeout = 3 * time.Second

	methodNone = "none"
	unnoticed  = "a server whose port a placeholder holds cannot start until the publication ends"
)

// SinkOptions configures the hook of a Sink.
type SinkOptions struct {
	Own func(cookie uint64) bool // whether a socket is the agent's
	// Ready is closed when all sources have reported; they need the CPU more urgently
	// than the hook.
	Ready <-chan struct{}
	// Disabled is why BPF programs must not be loaded, nil if they may.
	Disabled error
	// Attached, if not nil, is notified after the hook was attached, or could not be.
	Attached schedule.Signal
}

// Sink is the listener sink with the hook that closes a placeholder when a server wants
// its port, where the kernel supports it, and with the table that exempts placeholders
// from NAT.
type Sink struct {
	*listener.Sink
	o   SinkOptions
	log *slog.Logger

	watcher atomic.Pointer[Watcher]       // nil without a hook
	method  atomic.Pointer[kernel.Method] // how refused binds are observed, nil before Run

	untracked listener.Untracked
	nat       sync.Once // warned that NAT rules are not bypassed
}

// NewSink returns a sink; it sets o.Watch and o.Keep.
func NewSink(o listener.Options, h SinkOptions) (*Sink, error) {
	s := &Sink{o: h, log: o.Logger}
	o.Watch, o.Keep = s.watch, s.keep
	var err error
	s.Sink, err = listener.New(o)
	return s, err
}

func (s *Sink) watch(p uint16, on bool) {
	if w := s.watcher.Load(); w != nil {
		if err := w.Watch(p, on); err != nil {
			s.log.Warn("cannot detect bind conflicts of a placeholder", "err", err)
		}
	}
}

func (s *Sink) keep(at netip.AddrPort, on bool) {
	do := s.untracked.Put
	if !on {
		do = s.untracked.Remove
	}
	if err := do(at); err != nil {
		s.nat.Do(func() {
			s.log.Warn("OUTPUT NAT rules may intercept loopback traffic to placeholders", "err", err)
		})
	}
}

// Run is listener.Sink.Run.
func (s *Sink) Run(ctx context.Context) error {
	defer func() { _ = s.untracked.Close() }()
	if err := schedule.Wait(ctx, time.Now().Add(readyTimeout), s.o.Ready); err != nil {
		return err
	}
	g, ctx := errgroup.WithContext(ctx)
	if w, err := s.open(); err != nil {
		s.method.Store(&kernel.Method{Capability: Capability, Name: methodNone, Err: err, Lost: unnoticed})
		s.log.Warn("bind conflicts cannot be detected", "lost", unnoticed, "err", err)
	} else {
		m := w.Method()
		s.method.Store(&m)
		s.log.Info("bind conflicts are detected", m.LogAttr())
		s.watcher.Store(w)
		g.Go(func() error { return w.Run(ctx, s.contend) })
	}
	s.o.Attached.Notify()
	g.Go(func() error { return s.Sink.Run(ctx) })
	return g.Wait()
}

func (s *Sink) open() (*Watcher, error) {
	if s.o.Disabled != nil {
		return nil, s.o.Disabled
	}
	return Open()
}

// Hooks returns how refused binds are observed; none before Run.
func (s *Sink) Hooks() []kernel.Method {
	if m := s.method.Load(); m != nil {
		return []kernel.Method{*m}
	}
	return nil
}

func (s *Sink) contend(b Bind) {
	if s.o.Own(b.Cookie) {
		return
	}
	who := strconv.Quote(cmp.Or(b.Comm, "unknown"))
	if b.PID != 0 {
		who = fmt.Sprintf("pid %d (%s)", b.PID, who)
	}
	s.Contend(b.Protocol, b.Address, b.V6Only, who)
}
