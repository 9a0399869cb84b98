// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/source/engine"
)

// listener is a source that waits for a server, which may be on this machine.
type listener interface{ Listening(port uint16) }

// tellListeners tells sources what begins to listen here, so that they need not
// try again and again.
func (a *Agent) tellListeners(ctx context.Context) error {
	var who []listener
	for _, s := range a.sources {
		if l, ok := s.(listener); ok {
			who = append(who, l)
		}
	}
	if len(who) == 0 {
		return nil
	}
	pubs := a.registry.Publications().Subscribe()
	defer pubs.Close()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-pubs.C():
		}
		view, change := pubs.Take()
		for _, k := range change.Keys {
			if _, stands := view.Get(k); !stands || k.Protocol != port.TCP {
				continue
			}
			for _, l := range who {
				l.Listening(k.Port)
			}
		}
	}
}

// engineRetry is how long an engine that is gone is still believed.
func (a *Agent) engineRetry() engine.Retry {
	if a.cfg.EngineGrace == 0 {
		return engine.Retry{Grace: -1} // never withdrawn
	}
	return engine.Retry{Grace: a.cfg.EngineGrace}
}
