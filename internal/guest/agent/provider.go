// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"slices"

	"github.com/fairlead/fairlead/internal/guest/reconcile"
	"github.com/fairlead/fairlead/internal/guest/registry"
	"github.com/fairlead/fairlead/internal/guest/source/demand"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/table"
	"github.com/fairlead/fairlead/internal/status"
)

// provider implements status.Provider with the registry and the outcomes.
type provider struct {
	registry *registry.Registry
	outcomes *table.Table[port.Key, reconcile.Outcomes]
	// waiting is what is asked for by name and is not there.
	waiting *table.Table[string, demand.Waiting]
}

var _ status.Provider = provider{}

func (p provider) List() status.List {
	pubs, outs := p.registry.Publications().View(), p.outcomes.View()
	l := status.List{
		Generation:   pubs.Generation(),
		Publications: make([]status.Publication, 0, pubs.Len()),
		Sources:      p.Sources(),
	}
	for _, pub := range pubs.All() {
		l.Publications = append(l.Publications, describe(pub, outs))
	}
	if waiting := p.waiting.View(); waiting.Len() > 0 {
		for _, w := range waiting.All() {
			l.Publications = append(l.Publications, status.DescribeWaiting(w.Demand, w.Reason, w.Since))
		}
		slices.SortStableFunc(l.Publications, func(a, b status.Publication) int { return a.Key.Compare(b.Key) })
	}
	return l
}

// counts returns the number of active ports, and of all. Unlike List it does
// not allocate for each.
func (p provider) counts() (active, all int) {
	pubs, outs := p.registry.Publications().View(), p.outcomes.View()
	for k, pub := range pubs.All() {
		isActive := stateOf(pub, outs) == port.Active
		if other, ok := otherFamily(pubs, pub); ok {
			if k.Address.Is6() {
				continue // its port was counted
			}
			isActive = isActive || stateOf(other, outs) == port.Active
		}
		all++
		if isActive {
			active++
		}
	}
	return active, all
}

func (p provider) Sources() []status.Source {
	list := []status.Source{}
	for _, s := range p.registry.Sources().View().All() {
		list = append(list, status.Source{
			Name: s.Name, State: string(s.State), Method: s.Method, Error: s.Error, Warnings: s.Warnings,
		})
	}
	return list
}

func describe(p port.Publication, outs table.View[port.Key, reconcile.Outcomes]) status.Publication {
	reported, _ := outs.Get(p.Key)
	row := status.Describe(p, reported)
	if p.Decision.Allow && len(p.Dial) == 0 && row.Code == port.Unstated {
		row.Because(port.Because(port.Unserved))
	}
	return row
}

func (p provider) Changes(ctx context.Context, f func(status.Delta) error) error {
	pubs, outs, waiting := p.registry.Publications().Subscribe(), p.outcomes.Subscribe(), p.waiting.Subscribe()
	defer pubs.Close()
	defer outs.Close()
	defer waiting.Close()
	for first := true; ; first = false {
		if !first {
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-pubs.C():
			case <-outs.C():
			case <-waiting.C():
			}
		}
		pubView, pubChange := pubs.Take()
		outView, outChange := outs.Take()
		keys := make(map[port.Key]struct{}, len(pubChange.Keys)+len(outChange.Keys))
		for _, k := range slices.Concat(pubChange.Keys, outChange.Keys) {
			keys[k] = struct{}{}
		}
		d := status.Delta{Generation: pubView.Generation()}
		for k := range keys {
			if pub, ok := pubView.Get(k); ok {
				d.Put = append(d.Put, describe(pub, outView))
			} else {
				d.Removed = append(d.Removed, status.RowID{Key: k})
			}
		}
		addWaiting(&d, waiting)
		if err := f(d); err != nil {
			return err
		}
	}
}

// addWaiting adds what has changed of what is asked for by name and is not there.
func addWaiting(d *status.Delta, sub *table.Subscription[string, demand.Waiting]) {
	view, change := sub.Take()
	for _, text := range change.Keys {
		if w, ok := view.Get(text); ok {
			d.Put = append(d.Put, status.DescribeWaiting(w.Demand, w.Reason, w.Since))
		} else if asked, err := port.ParseDemand(text); err == nil {
			d.Removed = append(d.Removed, status.RowID{Key: port.Key{Protocol: asked.Protocol, Port: asked.Port}, Waits: text})
		}
	}
}
