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
	"sync"
	"time"

	"github.com/cilium/ebpf/btf"
)

// Observer tells a Handler which sockets serve.
type Observer struct {
	options  Options
	counters counters
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
func (o *Observer) Methods() []Method {
	if methods := o.counters.methods.Load(); methods != nil {
		return *methods
	}
	return nil
}

// ErrNoEvents says that mode BPF was asked for and the kernel has no hook for a
// capability that matters.
var ErrNoEvents = errors.New("the kernel gives no events")

// Run observes the network namespace of the calling thread until ctx ends, and
// then returns nil. It returns an error if it cannot begin, or if the ring
// buffer breaks; a failed dump it tells to the handler and tries again. Nothing
// that it made outlives it.
//
// It needs CAP_BPF, CAP_PERFMON, CAP_NET_ADMIN and, for processes of others,
// CAP_SYS_PTRACE; with less it polls, or knows less. Where a caller wants a
// namespace other than the process's own, it locks its thread in it.
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
	netns   *namespace
	dumper  *dumper
	mptcp   *diagConn // of the goroutine that finds owners
	kernel  *kernel   // nil: no BPF
	bpfErr  error     // why not
	ring    *ring     // nil without kernel
	hooks   closers
}

// open gathers what belongs to the calling thread's namespace.
func (o *Observer) open() (_ *session, err error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	s := &session{options: &o.options, counter: &o.counters}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.close())
		}
	}()
	if s.netns, err = openNamespace(); err != nil {
		return nil, err
	}
	if s.dumper, err = openDumper(s.netns); err != nil {
		return nil, err
	}
	if s.mptcp, err = openDiag(); err != nil {
		return nil, err
	}
	if o.options.Mode == Poll {
		return s, nil
	}
	if s.kernel, s.bpfErr = newKernel(o.options.RingBytes, s.netns.inode); s.bpfErr != nil {
		s.kernel = nil
		return s, nil
	}
	if s.ring, err = s.kernel.ring(o.options.RingBytes); err != nil {
		return nil, err
	}
	return s, nil
}

func (s *session) close() error {
	errs := []error{s.hooks.Close()}
	if s.ring != nil {
		errs = append(errs, s.ring.close())
	}
	if s.kernel != nil {
		errs = append(errs, s.kernel.close())
	}
	if s.mptcp != nil {
		errs = append(errs, s.mptcp.close())
	}
	if s.dumper != nil {
		errs = append(errs, s.dumper.close())
	}
	if s.netns != nil {
		errs = append(errs, s.netns.close())
	}
	return errors.Join(errs...)
}

func (s *session) run(ctx context.Context, h Handler) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var workers sync.WaitGroup
	failures := make(chan error, 2)
	defer workers.Wait()

	e := newEngine(h, s.options.Logger, s.counter)
	e.dump = s.dumper.dump
	finder := ownerFinder{proc: "/proc", budget: ownerBudget, mptcp: s.mptcp.mptcpListeners}
	e.owners = finder.find
	e.interval, e.audit, e.paced = s.options.Interval, s.options.Audit, s.options.pacedAudit

	if s.ring != nil {
		// Events are read from before the first hook is attached, and are
		// applied, but not told before the first Replace.
		e.source = &kernelSource{ring: s.ring, kernel: s.kernel}
		e.source.open(true)
		defer func() { _ = s.ring.shut() }()
		workers.Go(func() {
			if err := e.readEvents(); err != nil {
				failures <- err
				cancel()
			}
		})
	}
	var methods []Method
	var polled scope
	err := s.options.Types.lend(func(types *btf.Cache) (err error) {
		if s.kernel != nil {
			s.kernel.cache = types
		}
		methods, polled, err = s.attach(e)
		return err
	})
	if err != nil {
		return err
	}
	s.counter.methods.Store(&methods)
	h.Methods(methods)
	e.polled = polled
	workers.Go(func() { e.findOwners(ctx) })
	if s.kernel != nil && s.options.Types == nil {
		// Reading the kernel's types has left more garbage than all that is to
		// come; the runtime alone would keep its room for minutes.
		workers.Go(debug.FreeOSMemory)
	}

	err = e.dumps(ctx)
	cancel()
	if s.ring != nil {
		err = errors.Join(err, s.ring.shut())
	}
	workers.Wait()
	close(failures)
	for f := range failures {
		err = errors.Join(err, f)
	}
	return err
}

// attach climbs down the chain of each capability. It returns the methods and
// what must be polled.
func (s *session) attach(e *engine) ([]Method, scope, error) {
	var a attacher
	if s.kernel != nil {
		a = s.kernel
	}
	covers := map[string]scope{
		TCPListen: scopeTCPListen, TCPBind: scopeTCPBound, UDPBind: scopeUDP,
	}
	var methods []Method
	var polled scope
	for _, c := range capabilities(s.dumper.boundDump) {
		if c.name == UDPConnect && polled&scopeUDP != 0 {
			// The poll sees it.
			methods = append(methods, Method{Capability: c.name, Name: MethodPoll})
			continue
		}
		use := a
		if c.name == TCPBind && polled&scopeTCPListen != 0 {
			// What becomes of a bound socket is told by the hooks of listen.
			use = nil
		}
		at := attachChain(c, use, s.bpfErr, s.options.Methods)
		if at.hooks != nil {
			s.hooks = append(s.hooks, at.hooks)
		}
		if at.Name == MethodPoll {
			polled |= covers[c.name]
			if s.options.Mode == BPF && c.name != TCPBind {
				return nil, 0, fmt.Errorf("%s: %w: %w", c.name, ErrNoEvents, at.Err)
			}
		}
		methods = append(methods, at.Method)
	}
	// A kernel that dumps no bound sockets has nothing to poll for.
	bound := slices.ContainsFunc(methods, func(r Method) bool {
		return r.Capability == TCPBind && r.Name != MethodPoll
	})
	e.mu.Lock()
	e.model.bound = bound || s.dumper.boundDump
	if !s.dumper.boundDump {
		polled &^= scopeTCPBound
	}
	e.mu.Unlock()
	if s.kernel != nil {
		if s.kernel.explicit != nil {
			s.dumper.explicit = func() (map[uint64]struct{}, error) {
				return s.kernel.explicitUDP(s.netns)
			}
		}
		if bound {
			s.ring.control.bound.Store(1)
		}
		s.kernel.settle()
	}
	for _, r := range methods {
		s.options.Logger.Info("Observing", "capability", r.Capability, "method", r.Name, "lost", r.Lost, "better", Brief(r.Err))
	}
	return methods, polled, nil
}

// kernelSource is the eventSource of the kernel.
type kernelSource struct {
	*ring
	kernel *kernel
}

func (k *kernelSource) takeLost() bool {
	// A plain look first: the store would take the line from the producers.
	return k.control.lost.Load() != 0 && k.control.lost.Swap(0) != 0
}

func (k *kernelSource) drops() (all, skipped uint64) {
	skipped = k.kernel.misses()
	return k.kernel.losses() + skipped, skipped
}

func (k *kernelSource) open(open bool) {
	v := uint32(0)
	if open {
		v = 1
	}
	k.control.open.Store(v)
}

func (k *kernelSource) track(cookie uint64) error { return k.kernel.track(cookie) }
func (k *kernelSource) untrack(cookie uint64)     { k.kernel.untrack(cookie) }
func (k *kernelSource) trackable() int            { return k.kernel.trackable() }
