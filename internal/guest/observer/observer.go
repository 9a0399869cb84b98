// SPDX-License-Identifier: Apache-2.0

//go:build linux

package observer

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"runtime/debug"
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/fairlead/fairlead/internal/guest/kernel"
	"github.com/fairlead/fairlead/internal/guest/kernel/bpf"
)

// Observer reports to a Handler which sockets serve.
type Observer struct {
	options  Options
	counters counters
	running  atomic.Pointer[engine] // nil while no Run works
}

// New returns an Observer. It starts nothing.
func New(o Options) (*Observer, error) {
	o.setDefaults()
	if err := o.validate(); err != nil {
		return nil, fmt.Errorf("observer: %w", err)
	}
	return &Observer{options: o}, nil
}

// Stats returns what was counted so far, over all runs. It may be called at any
// time from any goroutine.
func (o *Observer) Stats() Stats {
	c := &o.counters
	return Stats{
		Events:       c.events.Load(),
		Malformed:    c.malformed.Load(),
		Drops:        c.drops.Load(),
		Skipped:      c.skipped.Load(),
		Resyncs:      c.resyncs.Load(),
		Drift:        c.drift.Load(),
		Dumps:        c.dumps.Load(),
		DumpFailures: c.dumpFailures.Load(),
		DumpTime:     time.Duration(c.dumpTime.Load()),
		Sockets:      int(c.sockets.Load()),
	}
}

// Methods returns how each capability is observed by the latest run, or nil before
// it is known. The slice must not be changed. It may be called at any time.
func (o *Observer) Methods() []kernel.Method {
	if methods := o.counters.methods.Load(); methods != nil {
		return *methods
	}
	return nil
}

// SearchOwner has /proc searched for the process that holds a socket now, because the
// one that was reported has ended. The handler receives the new process, or the socket
// with Sought. It does not block, and may be called by the handler.
func (o *Observer) SearchOwner(cookie uint64) {
	if e := o.running.Load(); e != nil {
		e.searchOwner(cookie)
	}
}

// ErrNoEvents says that mode BPF was configured and the kernel has no hook for a
// capability that matters.
var ErrNoEvents = errors.New("no hook can be attached")

// Run observes the network namespace of the calling thread until ctx ends, and
// then returns nil. It returns an error if it cannot begin, or if the ring
// buffer breaks. It reports a failed dump to the handler and tries again. When it
// returns, everything that it made is gone.
//
// It needs CAP_BPF, CAP_PERFMON, CAP_NET_ADMIN and, for other users' processes,
// CAP_SYS_PTRACE; with less it polls, or finds fewer processes. To observe another
// namespace than the process's own, the caller locks its thread in it.
func (o *Observer) Run(ctx context.Context, h Handler) (err error) {
	s, err := o.open()
	if err != nil {
		return fmt.Errorf("observer: %w", err)
	}
	defer func() {
		if cerr := s.close(); cerr != nil {
			err = errors.Join(err, fmt.Errorf("observer: %w", cerr))
		}
	}()
	if err := s.run(ctx, h); err != nil {
		return fmt.Errorf("observer: %w", err)
	}
	return nil
}

// session is one Run.
type session struct {
	options *Options
	counter *counters
	running *atomic.Pointer[engine]
	netns   *kernel.Namespace
	dumper  *dumper
	mptcp   *diagConn // of the goroutine that finds owners
	exits   *exits
	object  *kernel.Object // nil: no BPF
	bpfErr  error          // why not
	ring    *kernel.Ring   // nil without object
}

// open opens what belongs to the calling thread's namespace.
func (o *Observer) open() (_ *session, err error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	s := &session{options: &o.options, counter: &o.counters, running: &o.running}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.close())
		}
	}()
	if s.netns, err = kernel.OpenNamespace(); err != nil {
		return nil, err
	}
	if s.dumper, err = openDumper(s.netns); err != nil {
		return nil, err
	}
	if s.mptcp, err = openDiag(); err != nil {
		return nil, err
	}
	if s.exits, err = openExits(); err != nil {
		return nil, err
	}
	if o.options.Mode == Poll {
		return s, nil
	}
	if s.object, s.bpfErr = openHooks(o.options.Types, o.options.RingBytes, s.netns.Inode()); s.bpfErr != nil {
		return s, nil
	}
	if s.ring, err = s.object.Ring(bpf.SockMapEvents, bpf.SockMapControls); err != nil {
		return nil, err
	}
	return s, nil
}

func (s *session) close() error {
	var errs []error
	if s.object != nil {
		errs = append(errs, s.object.Close())
	}
	if s.ring != nil {
		errs = append(errs, s.ring.Close())
	}
	if s.exits != nil {
		errs = append(errs, s.exits.close())
	}
	if s.mptcp != nil {
		errs = append(errs, s.mptcp.close())
	}
	if s.dumper != nil {
		errs = append(errs, s.dumper.close())
	}
	if s.netns != nil {
		errs = append(errs, s.netns.Close())
	}
	return errors.Join(errs...)
}

func (s *session) run(ctx context.Context, h Handler) error {
	e := newEngine(h, s.options.Logger, s.counter)
	e.dump = s.dumper.dump
	finder := ownerFinder{proc: "/proc", budget: ownerBudget, mptcp: s.mptcp.mptcpListeners}
	e.owners = finder.find
	e.interval, e.audit, e.paced = s.options.Interval, s.options.Audit, s.options.pacedAudit

	e.holders = finder.holders
	e.exits = s.exits
	if s.object != nil {
		s.exits.named = s.object.Map(bpf.SockMapOwners)
	}

	s.running.Store(e)
	defer s.running.Store(nil)

	work, ctx := errgroup.WithContext(ctx)
	if s.ring != nil {
		// Events are read and applied from before the first hook is attached, but
		// not reported before the first Replace.
		e.source = &hooks{Ring: s.ring, object: s.object}
		e.source.open(true)
		stop := context.AfterFunc(ctx, func() { _ = s.ring.Stop() })
		defer stop()
		work.Go(func() error { return e.readEvents(ctx) })
	}
	work.Go(func() error {
		methods, polled, err := s.attach(e)
		if err != nil {
			return err
		}
		s.counter.methods.Store(&methods)
		s.options.Attached.Notify()
		h.Methods(methods)
		e.polled = polled
		work.Go(func() error { e.findOwners(ctx); return nil })
		work.Go(func() error { return e.watchExits(ctx) })
		if s.object != nil && s.options.Types == nil {
			// Reading the kernel's types leaves far more garbage than anything
			// later; the runtime by itself would keep that memory for minutes.
			work.Go(func() error { debug.FreeOSMemory(); return nil })
		}
		return e.dumps(ctx)
	})
	return work.Wait()
}

// attach attaches the best method of each capability. It returns the methods and
// what must be polled.
func (s *session) attach(e *engine) ([]kernel.Method, scope, error) {
	var attach func([]string) error
	if s.object != nil {
		attach = s.object.Attach
		defer s.object.FinishAttach()
	}
	covers := map[string]scope{
		TCPListen: scopeTCPListen, TCPBind: scopeTCPBound, UDPBind: scopeUDP,
	}
	var methods []kernel.Method
	var polled scope
	// Where MPTCP binds by this function, it no longer calls those that the hooks are on.
	has := features{boundDump: s.dumper.boundDump, mptcpBind: s.dumper.mptcp && s.object != nil && s.object.Has("inet_bind_sk")}
	for _, c := range capabilities(has) {
		if c.Name == UDPConnect && polled&scopeUDP != 0 || c.Name == Device && polled&(scopeTCPListen|scopeUDP) == scopeTCPListen|scopeUDP {
			// The poll sees it.
			methods = append(methods, kernel.Method{Capability: c.Name, Name: MethodPoll})
			continue
		}
		use := attach
		if c.Name == TCPBind && polled&scopeTCPListen != 0 {
			// Only the hooks of listen report what becomes of a bound socket.
			use = nil
		}
		m, err := c.Attach(use, s.bpfErr, s.options.Methods)
		if err != nil {
			return nil, 0, fmt.Errorf("%s: %w", c.Name, err)
		}
		if m.Name == MethodPoll {
			polled |= covers[c.Name]
			if s.options.Mode == BPF && c.Name != TCPBind {
				return nil, 0, fmt.Errorf("%s: %w: %w", c.Name, ErrNoEvents, m.Err)
			}
		}
		methods = append(methods, m)
	}
	if !s.dumper.boundDump {
		polled &^= scopeTCPBound
	}
	s.dumper.polls = polled != 0
	uses := func(capability, name string) bool {
		return slices.ContainsFunc(methods, func(m kernel.Method) bool { return m.Capability == capability && m.Name == name })
	}
	bound := !uses(TCPBind, MethodPoll)
	if s.object != nil && bound {
		s.ring.Control().Bound.Store(1)
	}
	if err := e.attached(bound || s.dumper.boundDump); err != nil {
		return nil, 0, err
	}
	if uses(UDPDump, kernel.MethodIter) {
		s.dumper.explicit = func() (map[uint64]struct{}, error) { return explicitUDP(s.object, s.netns) }
	}
	for _, m := range methods {
		s.options.Logger.Info("observing sockets", m.LogAttr())
	}
	return methods, polled, nil
}
