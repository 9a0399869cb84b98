// SPDX-License-Identifier: Apache-2.0

// Package none is the sink of an agent that only lists ports, as on a node of a cluster,
// whose ports need no host to be reachable.
package none

import (
	"context"

	"github.com/fairlead/fairlead/internal/guest/reconcile"
	"github.com/fairlead/fairlead/internal/port"
)

// Name is the sink's name in the configuration.
const Name = "none"

// Sink opens nothing. It implements reconcile.Sink.
type Sink struct{}

// Name implements reconcile.Sink.
func (Sink) Name() string { return Name }

// Sync implements reconcile.Sink. Every publication is active, at no address of a host.
func (Sink) Sync(_ context.Context, want reconcile.View, change reconcile.Change) (port.Outcomes, error) {
	out := make(port.Outcomes)
	add := func(k port.Key) { out[k] = []port.Outcome{{State: port.Active}} }
	if change.Base == 0 {
		for k := range want.All() {
			add(k)
		}
		return out, nil
	}
	for _, k := range change.Keys {
		if _, ok := want.Get(k); ok {
			add(k)
		}
	}
	return out, nil
}

// Wake implements reconcile.Sink: nothing outside can change.
func (Sink) Wake() <-chan struct{} { return nil }
