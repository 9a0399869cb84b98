// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"slices"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/source/engine"
)

// engineRetry is how long the ports of an engine that disappeared are kept.
func (a *Agent) engineRetry() engine.Retry {
	if a.cfg.EngineGrace == 0 {
		return engine.Retry{Grace: -1} // for ever
	}
	return engine.Retry{Grace: a.cfg.EngineGrace}
}

// waiter is a source that waits for a server, which may run on this machine.
type waiter interface {
	Waits() <-chan struct{} // receives when it starts to wait
	WaitsFor() uint16       // the TCP port, 0 while it does not wait
	Try()
}

// wakeWaiter wakes a source when its server begins to listen on this machine, so that
// the source need not poll. It does nothing while the source does not wait.
func (a *Agent) wakeWaiter(ctx context.Context, w waiter) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-w.Waits():
		}
		pubs := a.registry.Publications().Subscribe()
		pubs.Take() // the source has tried these
		for w.WaitsFor() != 0 && ctx.Err() == nil {
			select {
			case <-ctx.Done():
			case <-w.Waits():
			case <-pubs.C():
				view, change := pubs.Take()
				number := w.WaitsFor()
				if slices.ContainsFunc(change.Keys, func(k port.Key) bool {
					_, present := view.Get(k)
					return present && k.Protocol == port.TCP && k.Port == number
				}) {
					w.Try()
				}
			}
		}
		pubs.Close()
	}
}
