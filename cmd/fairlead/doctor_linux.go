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
var errFailing = errors.New("some checks failed: see the lines marked FAIL")

func newDoctor() *cobra.Command {
	var file, control string
	var out output
	c := &cobra.Command{
		Use:   "doctor",
		Short: "Diagnose the guest: privileges, kernel, sources, link",
		Long: "Diagnose the guest: privileges, kernel, sources, link. It works without a running agent.\n\n" +
			"Exit status: 0 if nothing fails, 1 if something does, 2 usage error. Warnings do not count.",
		Example: "  fairlead doctor\n  fairlead doctor -o json",
		GroupID: groupCheck,
		Args:    noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := out.validate(); err != nil {
				return err
			}
			r := doctor.Evaluate(gather.Facts(c.Context(), gather.Options{ConfigFile: file, Control: control, Look: look}))
			var err error
			if out.format == "json" {
				err = json.NewEncoder(c.OutOrStdout()).Encode(versioned(r))
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
