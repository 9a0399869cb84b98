// SPDX-License-Identifier: Apache-2.0

package nat

import (
	"context"
	"fmt"
	"sync/atomic"

	"golang.org/x/sync/errgroup"

	bpfkernel "github.com/fairlead/fairlead/internal/guest/kernel"
	"github.com/fairlead/fairlead/internal/guest/registry"
	"github.com/fairlead/fairlead/internal/guest/source/nat/watch"
)

// Hooked is a Source with the BPF hooks that report what nftables does not notify of,
// and with a filter of what it notifies of, as far as the kernel supports them. Without a
// hook, legacy tables are polled; without the filter, all notifications are read.
type Hooked struct {
	*Source
	legacy  *watch.Legacy
	methods atomic.Pointer[[]bpfkernel.Method] // nil until hooks were tried
}

// What the BPF programs of a Hooked do, as kernel.Method names it.
const (
	Capability       = "legacy-tables"
	CapabilityFilter = "nft-filter"
)

const (
	// MethodPoll reads legacy tables from time to time.
	MethodPoll = "poll"
	methodNone = "none"
)

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
	if legacy, err := watch.OpenLegacy(watch.LegacyOptions{Types: types}); err != nil {
		h.log.Info("polling legacy iptables tables", "reason", bpfkernel.Brief(err))
		method.Err = err
		method.Lost = fmt.Sprintf("changes of iptables-legacy are seen up to %v late", h.opt.LegacyPoll)
	} else {
		method.Name, method.Err = legacy.Method(), legacy.Better()
		h.legacy = legacy
		g.Go(func() error { return legacy.Run(ctx) })
	}
	filter := bpfkernel.Method{Capability: CapabilityFilter, Name: bpfkernel.MethodSocket}
	if f, err := watch.LoadFilter(types); err != nil {
		h.log.Info("reading all notifications of nftables", "reason", bpfkernel.Brief(err))
		filter.Name, filter.Err = methodNone, err
		filter.Lost = "nothing, but changes of tables without NAT cost CPU time"
	} else {
		defer func() { _ = f.Close() }()
		h.opt.Filter = f
	}
	h.methods.Store(&[]bpfkernel.Method{method, filter})
	h.opt.Attached.Notify()
	g.Go(func() error { return h.Source.Run(ctx, feed) })
	return g.Wait()
}

// Hooks returns the methods of the BPF programs; none before they were tried.
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

// Method implements Waker.
func (h *Hooked) Method() string { return h.legacy.Method() }
