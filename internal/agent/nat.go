// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"log/slog"

	"golang.org/x/sync/errgroup"

	"github.com/fairlead/fairlead/internal/config"
	"github.com/fairlead/fairlead/internal/kernel"
	"github.com/fairlead/fairlead/internal/observer"
	"github.com/fairlead/fairlead/internal/registry"
	"github.com/fairlead/fairlead/internal/schedule"
	"github.com/fairlead/fairlead/internal/source/nat"
	"github.com/fairlead/fairlead/internal/source/nat/hook"
)

// natSource is the NAT source with its hooks, where the kernel supports
// them. Without hooks the source follows nftables notifications and polls legacy
// tables. natSource implements nat.Waker.
type natSource struct {
	*nat.Source
	log     *slog.Logger
	hooks   bool // whether BPF programs may be loaded
	types   *kernel.Types
	legacy  *hook.Legacy
	modules *hook.Modules
}

func newNATSource(log *slog.Logger, cfg *config.Agent, types *kernel.Types, shrunk schedule.Signal) (*natSource, error) {
	s := &natSource{log: log, hooks: cfg.Observer != observer.Poll.String(), types: types}
	o := nat.Options{Log: log, MaxPorts: cfg.NAT.MaxPorts, Wake: s, Types: types, Shrunk: shrunk}
	if !s.hooks {
		o.Methods = []string{nat.MethodNetlink, nat.MethodGeneration}
	}
	var err error
	s.Source, err = nat.New(o)
	return s, err
}

// Run implements Source.
func (s *natSource) Run(ctx context.Context, feed registry.Feed) error {
	g, ctx := errgroup.WithContext(ctx)
	if s.hooks {
		if legacy, err := hook.OpenLegacy(hook.LegacyOptions{Types: s.types}); err != nil {
			s.log.Info("polling legacy iptables tables", "reason", kernel.Brief(err))
		} else {
			s.legacy = legacy
			g.Go(func() error { return legacy.Run(ctx) })
		}
		if modules, err := hook.OpenModules(s.types); err != nil {
			s.log.Debug("cannot observe kernel module loads", "reason", kernel.Brief(err))
		} else {
			s.modules = modules
			g.Go(func() error { return modules.Run(ctx) })
		}
	}
	g.Go(func() error { return s.Source.Run(ctx, feed) })
	return g.Wait()
}

// LegacyChanged implements nat.Waker.
func (s *natSource) LegacyChanged() <-chan struct{} {
	if s.legacy == nil {
		return nil
	}
	return s.legacy.LegacyChanged()
}

// ModuleLoaded implements nat.Waker.
func (s *natSource) ModuleLoaded() <-chan struct{} {
	if s.modules == nil {
		return nil
	}
	return s.modules.Loaded()
}

// Method implements nat.Waker.
func (s *natSource) Method() string { return s.legacy.Method() }
