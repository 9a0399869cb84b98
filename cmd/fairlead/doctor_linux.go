// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"time"

	"github.com/fairlead/fairlead/internal/config"
	"github.com/fairlead/fairlead/internal/guest/agent"
	"github.com/fairlead/fairlead/internal/guest/gather"
	"github.com/fairlead/fairlead/internal/status"
	"github.com/fairlead/fairlead/internal/status/doctor"
)

// canBeGuest reports whether this system can run an agent.
const canBeGuest = true

// lookTimeout is how long sources may take to report everything if no agent runs.
const lookTimeout = 15 * time.Second

func ask(ctx context.Context, control string) (doctor.Agent, error) {
	return status.NewClient(control).Examine(ctx)
}

func look(ctx context.Context, cfg config.Agent) (doctor.Agent, error) {
	return agent.Look(ctx, cfg, lookTimeout)
}

// doctorOfGuest examines the guest, and if selfTest is true tries whether events arrive.
func doctorOfGuest(ctx context.Context, file, control string, selfTest bool) doctor.Report {
	o := gather.Options{ConfigFile: file, Control: control, Ask: ask, Look: look}
	if selfTest {
		o.Try = agent.SelfTest
	}
	return doctor.Evaluate(gather.Facts(ctx, o))
}
