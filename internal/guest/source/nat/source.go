// SPDX-License-Identifier: Apache-2.0

package nat

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	bpfkernel "github.com/fairlead/fairlead/internal/guest/kernel"
	"github.com/fairlead/fairlead/internal/guest/registry"
	"github.com/fairlead/fairlead/internal/guest/source/nat/compile"
	"github.com/fairlead/fairlead/internal/guest/source/nat/watch"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/schedule"
)

// Options configure a Source. The zero value of a field is its default.
type Options struct {
	// Log receives transitions. Nil discards them.
	Log *slog.Logger
	// NetNS is the path of the network namespace to watch; empty is the process's own.
	NetNS string
	// MaxPorts is how many ports one rule may publish, 1 to 65,535; 4,096 by default.
	MaxPorts int
	// ReceiveBuffer is how many bytes of notifications the kernel queues; 8 MiB by default.
	ReceiveBuffer int
	// Audit is how often the model is compared with a dump. By default each 5
	// minutes, and up to 30: so seldom that it takes no more than 1/30,000 of the time.
	Audit time.Duration
	paced bool // Audit was not given
	// LegacyPoll is how often a legacy table is read while nothing reports
	// changes of it; 2 seconds by default.
	LegacyPoll time.Duration
	// Wake, if not nil, reports changes at once. A closed channel means that it
	// failed, and the source polls again.
	Wake Waker
	// Problems is notified when what NotUnderstood returns may have changed. It may be nil.
	Problems schedule.Signal
	// Types, if not nil, is shared with others that load BPF programs.
	Types *bpfkernel.Types
	// Filter, if not nil, leaves out notifications that do not concern NAT. No other source
	// has it.
	Filter watch.Filter
	// Attached, if not nil, is notified after hooks were attached, or could not be.
	Attached schedule.Signal
	// Methods limits the methods that are tried for nftables, by name; the last of those
	// named must work. Empty means all.
	Methods []string
}

// Methods for nftables, best first; see [watch].
const (
	MethodNetlink    = watch.MethodNetlink
	MethodGeneration = watch.MethodGeneration
)

// Methods returns the methods for nftables, best first.
func Methods() []string {
	return []string{MethodNetlink, MethodGeneration}
}

// Waker reports what nftables does not notify of. Its channel is asked for when the
// source runs; nil means that it cannot report.
type Waker interface {
	// LegacyChanged receives after a legacy nat table of the watched namespace
	// may have been replaced. It is closed when that can no longer be
	// reported.
	LegacyChanged() <-chan struct{}
	// Method names the mechanism of LegacyChanged, if that is not nil: "fentry",
	// "kprobe", "tracepoint".
	Method() string
}

func (o Options) withDefaults() Options {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.MaxPorts == 0 {
		o.MaxPorts = 4096
	}
	if o.ReceiveBuffer == 0 {
		o.ReceiveBuffer = 8 << 20
	}
	if o.Audit == 0 {
		o.Audit, o.paced = 5*time.Minute, true
	}
	if len(o.Methods) == 0 {
		o.Methods = Methods()
	}
	if o.LegacyPoll == 0 {
		o.LegacyPoll = 2 * time.Second
	}
	return o
}

func (o Options) validate() error {
	switch {
	case o.MaxPorts < 1 || o.MaxPorts > 65535:
		return fmt.Errorf("option MaxPorts %d: want 1 to 65535", o.MaxPorts)
	case o.Audit < time.Second:
		return fmt.Errorf("option Audit %v: want at least 1s", o.Audit)
	case o.LegacyPoll < 10*time.Millisecond:
		return fmt.Errorf("option LegacyPoll %v: want at least 10ms", o.LegacyPoll)
	}
	for _, r := range o.Methods {
		if !slices.Contains(Methods(), r) {
			return fmt.Errorf("option Methods: %q: want one of %q", r, Methods())
		}
	}
	return nil
}

// Problem is a rule that leads to a DNAT or REDIRECT but is not published.
type Problem = compile.Problem

// Status is what a Source reports of itself.
type Status struct {
	Method       string            // by which changes of nftables are seen; "" before the first
	Published    int               // bindings
	Problems     []compile.Problem // what is not understood, sorted, at most 1,000
	ProblemCount int               `metric:"nat_unsupported_rules" help:"Current NAT rules that forward a port but use an unsupported expression, so they are not published."`
	Commits      uint64            `metric:"nat_reads_total" label:"kind=commit of nftables applied" help:"NAT rulesets read, and nftables commits applied."`
	Dumps        uint64            `metric:"nat_reads_total" label:"kind=dump of nftables"`
	LegacyReads  uint64            `metric:"nat_reads_total" label:"kind=legacy table"`
	Failures     uint64            `metric:"nat_read_failures_total" help:"Failed reads of NAT rules; each is retried."`
	Lost         uint64            `metric:"nat_losses_total" help:"Lost notifications about NAT rules; each loss forces a dump."`
	Drift        uint64            `metric:"nat_drift_total" help:"NAT objects that a background dump had to correct."`
	Evaluated    uint64            `metric:"nat_rules_evaluated_total" help:"NAT rules evaluated."`
}

// Source publishes the ports that NAT rules make reachable.
type Source struct {
	opt Options
	log *slog.Logger

	method string // the last one that was logged; of the goroutine that runs

	mu     sync.Mutex
	status Status // guarded by mu
}

// New returns a source; it does nothing until Run.
func New(opt Options) (*Source, error) {
	opt = opt.withDefaults()
	if err := opt.validate(); err != nil {
		return nil, fmt.Errorf("nat source: %w", err)
	}
	return &Source{opt: opt, log: opt.Log}, nil
}

// Name returns "nat".
func (s *Source) Name() string { return port.SourceNAT }

// NotUnderstood returns the rules that lead to a DNAT or REDIRECT and are not
// published because they are not understood, sorted, at most 1,000, and how many
// there are in all. The slice is shared and immutable.
func (s *Source) NotUnderstood() (rules []compile.Problem, all int) {
	st := s.Status()
	return st.Problems, st.ProblemCount
}

// Status returns what is known now. The slices in it are shared and immutable.
func (s *Source) Status() Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.status
}

// runWith runs sessions over what open gives until ctx ends.
func (s *Source) runWith(ctx context.Context, feed registry.Feed, open func() (system, func(), error)) error {
	c := compile.New(s.opt.MaxPorts)
	pause := schedule.Backoff{Min: 500 * time.Millisecond, Max: 30 * time.Second}
	for ctx.Err() == nil {
		known, err := s.runSession(ctx, feed, c, open)
		if known {
			pause.Reset()
		}
		if ctx.Err() == nil {
			feed.Stale(err)
			_ = schedule.Sleep(ctx, pause.Next())
		}
	}
	return nil
}

// runSession runs one session and reports whether it stated a complete set.
func (s *Source) runSession(ctx context.Context, feed registry.Feed, c *compile.Compiler, open func() (system, func(), error)) (bool, error) {
	sys, done, err := open()
	if err != nil {
		return false, err
	}
	defer done()
	x := newSession(s, feed, c, sys)
	err = x.run(ctx)
	return x.known, err
}
