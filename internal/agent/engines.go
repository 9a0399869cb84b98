// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"slices"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/source/engine"
)

// engineRetry is how long an engine that is gone is still believed.
func (a *Agent) engineRetry() engine.Retry {
	if a.cfg.EngineGrace == 0 {
		return engine.Retry{Grace: -1} // never withdrawn
	}
	return engine.Retry{Grace: a.cfg.EngineGrace}
}

// waiter is a source that waits for a server, which may be on this machine.
type waiter interface {
	Waits() <-chan struct{} // receives when it begins to wait
	WaitsFor() uint16       // the TCP port, 0 while it does not wait
	Try()
}

// tellWaiter lets a source know when its server begins to listen here, so that it
// need not try again and again. It looks at nothing while the source does not wait.
func (a *Agent) tellWaiter(ctx context.Context, w waiter) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-w.Waits():
		}
		pubs := a.registry.Publications().Subscribe()
		pubs.Take() // what listened before was tried
		for w.WaitsFor() != 0 && ctx.Err() == nil {
			select {
			case <-ctx.Done():
			case <-w.Waits():
			case <-pubs.C():
				view, change := pubs.Take()
				number := w.WaitsFor()
				if slices.ContainsFunc(change.Keys, func(k port.Key) bool {
					_, stands := view.Get(k)
					return stands && k.Protocol == port.TCP && k.Port == number
				}) {
					w.Try()
				}
			}
		}
		pubs.Close()
	}
}
