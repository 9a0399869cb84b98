// SPDX-License-Identifier: Apache-2.0

package nat

import (
	"context"
	"fmt"
	"sync/atomic"

	"golang.org/x/sync/errgroup"

	bpfkernel "github.com/fairlead/fairlead/internal/kernel"
	"github.com/fairlead/fairlead/internal/registry"
	"github.com/fairlead/fairlead/internal/source/nat/hook"
)

// Hooked is a Source with the BPF hooks that report what nftables does not notify of,
// as far as the kernel supports them. Without a hook, legacy tables are polled.
type Hooked struct {
	*Source
	legacy  *hook.Legacy
	modules *hook.Modules
	methods atomic.Pointer[[]bpfkernel.Method] // nil until hooks were tried
}

// Capability is what the hooks of a Hooked observe, as kernel.Method names it.
const Capability = "legacy-tables"

// MethodPoll reads legacy tables from time to time.
const MethodPoll = "poll"

// NewHooked returns a source that attaches its hooks when it runs, in the network
// namespace of the process. It is the Waker of its options.
func NewHooked(o Options) (*Hooked, error) {
	h := &Hooked{}
	o.Wake = h
	var err error
	h.Source, err = New(o)
	return h, err
}

// Run is Source.Run.
func (h *Hooked) Run(ctx context.Context, feed registry.Feed) error {
	g, ctx := errgroup.WithContext(ctx)
	types := h.opt.Types
	method := bpfkernel.Method{Capability: Capability, Name: MethodPoll}
	if legacy, err := hook.OpenLegacy(hook.LegacyOptions{Types: types}); err != nil {
		h.log.Info("polling legacy iptables tables", "reason", bpfkernel.Brief(err))
		method.Err = err
		method.Lost = fmt.Sprintf("changes of iptables-legacy are seen up to %v late", h.opt.LegacyPoll)
	} else {
		method.Name, method.Err = legacy.Method(), legacy.Better()
		h.legacy = legacy
		g.Go(func() error { return legacy.Run(ctx) })
	}
	if modules, err := hook.OpenModules(types); err != nil {
		h.log.Debug("cannot observe kernel module loads", "reason", bpfkernel.Brief(err))
	} else {
		h.modules = modules
		g.Go(func() error { return modules.Run(ctx) })
	}
	h.methods.Store(&[]bpfkernel.Method{method})
	h.opt.Attached.Notify()
	g.Go(func() error { return h.Source.Run(ctx, feed) })
	return g.Wait()
}

// Hooks returns how legacy tables are observed; none before hooks were tried.
func (h *Hooked) Hooks() []bpfkernel.Method {
	if m := h.methods.Load(); m != nil {
		return *m
	}
	return nil
}

// LegacyChanged implements Waker.
func (h *Hooked) LegacyChanged() <-chan struct{} {
	if h.legacy == nil {
		return nil
	}
	return h.legacy.LegacyChanged()
}

// ModuleLoaded implements Waker.
func (h *Hooked) ModuleLoaded() <-chan struct{} {
	if h.modules == nil {
		return nil
	}
	return h.modules.Loaded()
}

// Method implements Waker.
func (h *Hooked) Method() string { return h.legacy.Method() }
