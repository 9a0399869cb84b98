// SPDX-License-Identifier: Apache-2.0

package agent

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

	"github.com/fairlead/fairlead/internal/kernel"
	"github.com/fairlead/fairlead/internal/observer"
	"github.com/fairlead/fairlead/internal/reconcile"
	"github.com/fairlead/fairlead/internal/schedule"
	"github.com/fairlead/fairlead/internal/sink/listener"
	"github.com/fairlead/fairlead/internal/sink/listener/refused"
)

// listenerSink is the listener sink with the hook that reports a refused
// bind to a placeholder's port, where the kernel supports it.
type listenerSink struct {
	*listener.Sink
	log  *slog.Logger
	own  func(cookie uint64) bool
	hook bool // whether BPF programs may be loaded

	ready <-chan struct{} // closed when all sources have reported

	refused atomic.Pointer[refused.Watcher] // nil without a hook
	method  atomic.Pointer[kernel.Method]   // how refused binds are observed, nil before Run

	untracked listener.Untracked
	nat       sync.Once // warned that NAT rules are not bypassed
}

func (a *Agent) wireListener() (reconcile.Sink, error) {
	l := &listenerSink{log: a.log, own: a.sockets.Has, hook: a.cfg.Observer != observer.Poll.String(), ready: a.registry.Ready()}
	o := listener.Options{
		Network: a.sockets,
		Serve:   a.forward.Carry,
		Sockets: a.registry.At,
		Watch:   l.watch,
		Keep:    l.keep,
		Settle:  a.cfg.Listener.Settle,
		Logger:  a.log,
	}
	if a.cfg.Listener.UDP {
		o.ServeUDP = a.forward.ServeUDP
	}
	var err error
	l.Sink, err = listener.New(o)
	return l, err
}

func (l *listenerSink) watch(p uint16, on bool) {
	if c := l.refused.Load(); c != nil {
		if err := c.Watch(p, on); err != nil {
			l.log.Warn("cannot detect bind conflicts of a placeholder", "err", err)
		}
	}
}

func (l *listenerSink) keep(at netip.AddrPort, on bool) {
	do := l.untracked.Put
	if !on {
		do = l.untracked.Remove
	}
	if err := do(at); err != nil {
		l.nat.Do(func() {
			l.log.Warn("OUTPUT NAT rules may intercept loopback traffic to placeholders", "err", err)
		})
	}
}

// Run implements runner.
func (l *listenerSink) Run(ctx context.Context) error {
	defer func() { _ = l.untracked.Close() }()
	// Attach after the sources' start, which needs the CPU more urgently.
	if err := schedule.Wait(ctx, time.Now().Add(sourcesTimeout), l.ready); err != nil {
		return err
	}
	g, ctx := errgroup.WithContext(ctx)
	if c, err := l.open(); err != nil {
		l.method.Store(&kernel.Method{Capability: refused.Capability, Name: methodNone, Err: err, Lost: unnoticed})
		l.log.Warn("bind conflicts cannot be detected", "lost", unnoticed, "err", err)
	} else {
		r := c.Method()
		l.method.Store(&r)
		l.log.Info("bind conflicts are detected", "method", r.Name, "lost", r.Lost)
		l.refused.Store(c)
		g.Go(func() error { return c.Run(ctx, l.contend) })
	}
	g.Go(func() error { return l.Sink.Run(ctx) })
	return g.Wait()
}

const (
	// sourcesTimeout is how long the start of the sources may delay the hook.
	sourcesTimeout = 3 * time.Second

	methodNone = "none"
	unnoticed  = "a server whose port a placeholder holds cannot start until the publication ends"
)

// hooks implements hooked.
func (l *listenerSink) hooks() []kernel.Method {
	if r := l.method.Load(); r != nil {
		return []kernel.Method{*r}
	}
	return nil
}

func (l *listenerSink) open() (*refused.Watcher, error) {
	if !l.hook {
		return nil, fmt.Errorf("--observer %s loads no BPF programs", observer.Poll)
	}
	return refused.Open()
}

func (l *listenerSink) contend(b refused.Bind) {
	if l.own(b.Cookie) {
		return
	}
	who := strconv.Quote(cmp.Or(b.Comm, "unknown"))
	if b.PID != 0 {
		who = fmt.Sprintf("pid %d (%s)", b.PID, who)
	}
	l.Contend(b.Protocol, b.Address, b.V6Only, who)
}
