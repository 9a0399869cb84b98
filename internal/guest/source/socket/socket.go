// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package socket is the source of ports that have a socket of their own: TCP
// listeners, TCP sockets that are bound only, and bound UDP sockets of the
// watched network namespace, as the observer sees them.
package socket

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"sync"

	"github.com/fairlead/fairlead/internal/guest/cgroup"
	"github.com/fairlead/fairlead/internal/guest/netwatch"
	"github.com/fairlead/fairlead/internal/guest/observer"
	"github.com/fairlead/fairlead/internal/guest/registry"
	"github.com/fairlead/fairlead/internal/port"
)

// Name is the source's name in rules and status.
const Name = port.SourceSocket

// Observer is what the source needs of an observer.
type Observer interface {
	Run(ctx context.Context, h observer.Handler) error
	// SearchOwner has the process searched that holds a socket now. It does not block.
	SearchOwner(cookie uint64)
}

// Options configures a Source.
type Options struct {
	Observer Observer
	// Own reports whether a socket cookie is of the agent's own: never published.
	Own func(cookie uint64) bool
	// Stands are addresses of the loopback that the agent dials for something else. May be zero.
	Stands netip.Prefix
	Logger *slog.Logger
}

func (o Options) validate() error {
	switch {
	case o.Observer == nil:
		return errors.New("socket source: Observer is missing")
	case o.Own == nil:
		return errors.New("socket source: Own is missing")
	case o.Logger == nil:
		return errors.New("socket source: Logger is missing")
	}
	return nil
}

// Source turns sockets into bindings.
type Source struct{ o Options }

// New returns a source. It starts nothing.
func New(o Options) (*Source, error) {
	if err := o.validate(); err != nil {
		return nil, err
	}
	return &Source{o}, nil
}

// Name returns "socket".
func (s *Source) Name() string { return Name }

// Run feeds the registry until ctx ends.
func (s *Source) Run(ctx context.Context, feed registry.Feed) error {
	tree, err := cgroup.Open("")
	if err != nil {
		s.o.Logger.Warn("cgroups cannot be read; sockets are not attributed to containers", "err", err)
	} else {
		defer func() { _ = tree.Close() }()
	}
	h := &handler{feed: feed, own: s.o.Own, network: ownNetwork(s.o.Stands), processes: newProcesses(newProcfs(), tree), search: s.o.Observer.SearchOwner}
	defer h.stop()
	ctx, cancel := context.WithCancel(ctx)
	var following sync.WaitGroup
	defer following.Wait()
	defer cancel()
	// A guest without a socket that needs it watches nothing.
	h.follow = sync.OnceFunc(func() {
		following.Go(func() { s.followNetwork(ctx, h) })
	})
	return s.o.Observer.Run(ctx, h)
}

// followNetwork has sockets rechecked after changes of addresses, until ctx ends.
func (s *Source) followNetwork(ctx context.Context, h *handler) {
	// A socket can have been judged by an address that came and went.
	netwatch.Follow(ctx, netwatch.Options{Log: s.o.Logger, Parts: netwatch.Links | netwatch.Addresses, Passing: true}, h.recheck)
}
