// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"

	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/netwatch"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/rules"
	"github.com/fairlead/fairlead/internal/sink/hostlink"
	"github.com/fairlead/fairlead/internal/source/demand"
	"github.com/fairlead/fairlead/internal/wire"
)

// Who asks for ports that nobody published.
const (
	askedByRules = "rules"
	askedByHost  = "host"
)

// wireDemand makes the source of what nobody published, if a source knows containers or
// Services.
func (a *Agent) wireDemand() (err error) {
	o := demand.Options{Kind: netwatch.Classify, Logger: a.log.With("source", port.SourceDemand)}
	var names []string
	for _, s := range a.sources {
		if d, ok := s.(demand.Directory); ok {
			o.Directories, names = append(o.Directories, d), append(names, s.Name())
		}
	}
	if len(o.Directories) == 0 {
		return nil
	}
	o.Await = func(ctx context.Context) { a.registry.AwaitStarted(ctx, names...) }
	if a.demand, err = demand.New(o); err == nil {
		a.sources = append(a.sources, a.demand)
	}
	return err
}

// takeDemands has a host ask for ports by name, if the configuration says so.
func (a *Agent) takeDemands(o *hostlink.Options, l *link.Options) {
	if a.demand == nil || !a.cfg.HostForwards {
		return
	}
	l.Demand = true
	o.Demand = func(list []port.Demand) { a.demand.Ask(askedByHost, list) }
	o.DemandsChanged = a.demand.Changed()
	o.Demands = func() (list []wire.Waiting) {
		for _, s := range a.demand.States() {
			if s.Reason != "" {
				list = append(list, wire.NewWaiting(s.Demand, s.Reason))
			}
		}
		return list
	}
}

// demandOf asks for what the run-time rules of a set ask for.
func (a *Agent) demandOf(set *rules.Set) {
	if a.demand != nil {
		a.demand.Ask(askedByRules, set.Demands(""))
	}
}

// demands returns why a demand waits, for a guest of a host; "" if it does not.
func (a *Agent) demands(_ string, d port.Demand) string {
	if a.demand == nil {
		return "no source knows containers or Services: enable docker, containerd or kube (--source)"
	}
	for _, s := range a.demand.States() {
		if s.Demand == d {
			return s.Reason
		}
	}
	return ""
}
