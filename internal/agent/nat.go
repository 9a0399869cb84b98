// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"log/slog"

	"golang.org/x/sync/errgroup"

	"github.com/fairlead/fairlead/internal/observer"
	"github.com/fairlead/fairlead/internal/registry"
	"github.com/fairlead/fairlead/internal/source/nat"
)

// natSource is the NAT source with the observer's hook on legacy tables, where
// the kernel takes one. Without it the source looks at legacy tables itself.
type natSource struct {
	log  *slog.Logger
	hook bool // whether BPF programs may be loaded
}

// Name implements Source.
func (natSource) Name() string { return "nat" }

// Run implements Source.
func (s natSource) Run(ctx context.Context, feed registry.Feed) error {
	o := nat.Options{Log: s.log}
	g, ctx := errgroup.WithContext(ctx)
	if s.hook {
		legacy, err := observer.OpenLegacy(observer.LegacyOptions{})
		if err != nil {
			s.log.Info("legacy iptables tables are polled", "err", err)
		} else {
			o.Wake = legacy
			g.Go(func() error { return legacy.Run(ctx) })
		}
	}
	source, err := nat.New(o)
	if err != nil {
		return err
	}
	g.Go(func() error { return source.Run(ctx, feed) })
	return g.Wait()
}
