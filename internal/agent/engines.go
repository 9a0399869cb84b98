// SPDX-License-Identifier: Apache-2.0

package agent

import "github.com/fairlead/fairlead/internal/source/engine"

// engineRetry is how long an engine that is gone is still believed.
func (a *Agent) engineRetry() engine.Retry {
	if a.cfg.EngineGrace == 0 {
		return engine.Retry{Grace: -1} // never withdrawn
	}
	return engine.Retry{Grace: a.cfg.EngineGrace}
}
