// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sync/errgroup"

	"github.com/fairlead/fairlead/internal/config"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/reconcile"
	"github.com/fairlead/fairlead/internal/sink/detect"
)

// chosenSinks returns the sinks of the configuration, or those that fit this guest.
func (a *Agent) chosenSinks() []config.Sink {
	if a.cfg.Sinks[0].Name != config.AutoSink {
		return a.cfg.Sinks
	}
	sinks, why := detect.Sinks(context.Background(), !slices.Equal(a.cfg.Link, config.DefaultAgent().Link))
	names := make([]string, len(sinks))
	for i, s := range sinks {
		names[i] = s.String()
	}
	a.log.Info("sinks chosen", "sinks", strings.Join(names, ","), "reason", why)
	return sinks
}

// newSink makes a sink.
func (a *Agent) newSink(s config.Sink) (reconcile.Sink, error) {
	switch s.Name {
	case "hostlink":
		if err := a.wireHostlink(); err != nil {
			return nil, err
		}
		return a.hostlink, nil
	case "listener":
		return a.wireListener()
	case "gvproxy", "vtunnel":
		return a.newPeerSink(s)
	}
	return nil, fmt.Errorf("sink %q: want hostlink, listener, gvproxy or vtunnel", s.Name)
}

// resetter is a sink that resets the flows of keys that a rule now denies.
type resetter interface {
	Reset(keys []port.Key)
}

// runSinks runs the sinks that have work of their own.
func (a *Agent) runSinks(ctx context.Context, g *errgroup.Group) {
	for _, s := range a.sinks {
		if r, ok := s.(runner); ok {
			g.Go(func() error { return r.Run(ctx) })
		}
	}
}

// resetFlows resets the flows of publications that a rule now denies.
func (a *Agent) resetFlows(keys []port.Key) {
	for _, s := range a.sinks {
		if c, ok := s.(resetter); ok {
			c.Reset(keys)
		}
	}
}
