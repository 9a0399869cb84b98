// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"time"

	"github.com/spf13/cobra"

	"github.com/fairlead/fairlead/internal/agent"
	"github.com/fairlead/fairlead/internal/config"
	"github.com/fairlead/fairlead/internal/diagnose/doctor"
	"github.com/fairlead/fairlead/internal/diagnose/gather"
	"github.com/fairlead/fairlead/internal/status"
)

// lookTimeout is how long sources may take to report everything if no agent runs.
const lookTimeout = 15 * time.Second

func look(ctx context.Context, cfg config.Agent) (doctor.Agent, error) {
	return agent.Look(ctx, cfg, lookTimeout)
}

// errFailing only sets the exit status: the report has the details.
var errFailing = errors.New("something is failing: see the lines marked FAIL")

func newDoctor() *cobra.Command {
	var file, control string
	var out output
	c := &cobra.Command{
		Use:   "doctor",
		Short: "Check what this guest has and what the agent makes of it; exit status 1 if something is failing",
		Args:  noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := out.validate(); err != nil {
				return err
			}
			r := doctor.Evaluate(gather.Facts(c.Context(), gather.Options{ConfigFile: file, Control: control, Look: look}))
			var err error
			if out.format == "json" {
				err = json.NewEncoder(c.OutOrStdout()).Encode(r)
			} else {
				err = status.WriteDoctor(c.OutOrStdout(), r, painter(c.OutOrStdout()))
			}
			if err == nil && r.State == doctor.Failing {
				err = errFailing
			}
			return err
		},
	}
	c.Flags().StringVar(&file, "config", "", "configuration file of the agent (default "+config.DefaultAgentFile+")")
	c.Flags().StringVar(&control, "control", "", "control socket of the agent (default: $FAIRLEAD_CONTROL, else that of the configuration)")
	out.register(c, "text", "json")
	return c
}
