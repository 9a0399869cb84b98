// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"

	"github.com/fairlead/fairlead/internal/guest/netwatch"
	"github.com/fairlead/fairlead/internal/guest/source/demand"
	"github.com/fairlead/fairlead/internal/port"
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

// demands returns why a demand waits; no reason if it does not.
func (a *Agent) demands(d port.Demand) port.Reason {
	w, _ := a.demand.Waiting().View().Get(d.String())
	return w.Reason
}
