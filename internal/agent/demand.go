// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"

	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/netwatch"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/sink/hostlink"
	"github.com/fairlead/fairlead/internal/source/demand"
	"github.com/fairlead/fairlead/internal/wire"
)

// Who asks for ports that nobody published.
const (
	askedByRules = "rules"
	askedByHost  = "host"
)

// wireDemand makes the source of what nobody published. Where no source knows containers or
// Services there is nothing to run, and all that is asked for waits.
func (a *Agent) wireDemand() (err error) {
	o := demand.Options{Kind: netwatch.Classify, Logger: a.log.With("source", port.SourceDemand)}
	var names []string
	for _, s := range a.sources {
		if d, ok := s.(demand.Directory); ok {
			o.Directories, names = append(o.Directories, d), append(names, s.Name())
		}
	}
	o.Await = func(ctx context.Context) { a.registry.AwaitStarted(ctx, names...) }
	if a.demand, err = demand.New(o); err == nil && len(o.Directories) > 0 {
		a.sources = append(a.sources, a.demand)
	}
	return err
}

// takeDemands has a host ask for ports by name, if the configuration says so, and reports what
// waits: what the host asked for, and what this guest did as its other unpublished ports.
func (a *Agent) takeDemands(o *hostlink.Options, l *link.Options) {
	if a.cfg.HostForwards {
		l.Demand = true
		o.Demand = func(list []port.Demand) {
			a.demand.Drop(askedByHost, list) // the host leaves it closed for a short time only
			a.demand.Ask(askedByHost, list)
		}
	}
	if !a.cfg.HostForwards && !a.cfg.ReportUnpublished {
		return
	}
	o.DemandsChanged = a.demand.Changed()
	o.Demands = func() (list []wire.Waiting) {
		for _, w := range a.demand.Waiting().View().All() {
			if a.cfg.ReportUnpublished || a.demand.Asks(askedByHost, w.Demand) {
				list = append(list, wire.NewWaiting(w.Demand, w.Reason))
			}
		}
		return list
	}
}

// demands returns why a demand waits, for a guest of a host; "" if it does not.
func (a *Agent) demands(_ string, d port.Demand) string {
	w, _ := a.demand.Waiting().View().Get(d.String())
	return w.Reason
}
