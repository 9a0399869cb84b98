// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sync/errgroup"

	"github.com/fairlead/fairlead/internal/config"
	"github.com/fairlead/fairlead/internal/guest/observer"
	"github.com/fairlead/fairlead/internal/guest/reconcile"
	"github.com/fairlead/fairlead/internal/guest/sink/auto"
	"github.com/fairlead/fairlead/internal/guest/sink/detect"
	"github.com/fairlead/fairlead/internal/guest/sink/listener"
	"github.com/fairlead/fairlead/internal/guest/sink/listener/refused"
	"github.com/fairlead/fairlead/internal/guest/sink/none"
	"github.com/fairlead/fairlead/internal/port"
)

// chosenSinks returns the sinks of the configuration, or those that fit this guest.
func (a *Agent) chosenSinks() (sinks []config.Sink) {
	if a.cfg.Sinks[0].Name != config.AutoSink {
		return a.cfg.Sinks
	}
	newGvproxy := func(url string) (auto.Sink, error) { return a.newPeerSink(config.Sink{Name: auto.Gvproxy, URL: url}) }
	var choice detect.Choice
	var others []detect.Sink
	a.auto, choice, others = auto.New(!slices.Equal(a.cfg.Link, config.DefaultAgent().Link), newGvproxy, a.log)
	var names []string
	for _, s := range choice.Sinks {
		names = append(names, config.Sink(s).String())
	}
	a.log.Info("sinks chosen", "sinks", strings.Join(names, ","), "reason", choice.Why)
	a.sinks = append(a.sinks, a.auto.Slot())
	for _, s := range others {
		sinks = append(sinks, config.Sink(s))
	}
	return sinks
}

// newSink makes a sink.
func (a *Agent) newSink(s config.Sink) (reconcile.Sink, error) {
	switch s.Name {
	case "listener":
		sink, err := a.newListenerSink()
		if err != nil || a.auto == nil {
			return sink, err
		}
		return a.auto.StandBy(sink), nil
	case "gvproxy", "vtunnel":
		return a.newPeerSink(s)
	case none.Name:
		return none.Sink{}, nil
	}
	return nil, fmt.Errorf("sink %q: want hostlink, listener, gvproxy, vtunnel or none", s.Name)
}

// newListenerSink makes the listener sink.
func (a *Agent) newListenerSink() (*refused.Sink, error) {
	o := listener.Options{
		Network: a.sockets, Serve: a.forward.Carry, Sockets: a.registry.At, Settle: a.cfg.Listener.Settle, Logger: a.log,
	}
	if a.cfg.Listener.UDP {
		o.ServeUDP = a.forward.ServeUDP
	}
	h := refused.SinkOptions{Own: a.sockets.Has, Ready: a.registry.Ready(), Attached: a.tried}
	if !a.mayLoadBPF() {
		h.Disabled = fmt.Errorf("--observer %s loads no BPF programs", observer.Poll)
	}
	return refused.NewSink(o, h)
}

// mayLoadBPF reports whether the configuration lets the agent load BPF programs.
func (a *Agent) mayLoadBPF() bool { return a.cfg.Observer != observer.Poll.String() }

// resetter is a sink that resets the flows of keys that a rule now denies.
type resetter interface {
	Reset(keys []port.Key)
}

// runSinks runs the sinks that have work of their own.
func (a *Agent) runSinks(ctx context.Context, g *errgroup.Group) {
	if a.auto != nil {
		g.Go(func() error { return a.auto.Run(ctx) })
	}
	for _, s := range a.sinks {
		if r, ok := s.(auto.Sink); ok {
			g.Go(func() error { return r.Run(ctx) })
		}
	}
	if a.hostlink != nil {
		g.Go(func() error { return a.hostlink.Run(ctx) })
	}
}

// resetFlows resets the flows of publications that a rule now denies.
func (a *Agent) resetFlows(keys []port.Key) {
	for _, s := range a.sinks {
		if c, ok := s.(resetter); ok {
			c.Reset(keys)
		}
	}
	if a.hostlink != nil {
		a.hostlink.Reset(keys)
	}
}
