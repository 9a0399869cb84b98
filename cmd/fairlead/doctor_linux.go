// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/fairlead/fairlead/internal/agent"
	"github.com/fairlead/fairlead/internal/config"
	"github.com/fairlead/fairlead/internal/doctor"
	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/status"
	"github.com/fairlead/fairlead/internal/version"
)

// lookPatience is how long sources get to see everything where no agent runs.
const lookPatience = 15 * time.Second

// errFailing is the exit status alone: the report has said the rest.
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
			r := doctor.Evaluate(examine(c.Context(), file, control))
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

// examine gathers the facts, from a running agent or else from a look of our own.
func examine(ctx context.Context, file, control string) doctor.Facts {
	f := doctor.Facts{Version: version.String(), Now: time.Now()}
	cfg, err := config.LoadAgent(file, nil, os.LookupEnv)
	if err != nil {
		cfg = config.DefaultAgent()
	}
	control = cmp.Or(control, os.Getenv("FAIRLEAD_CONTROL"), cfg.Control)
	a, agentErr := status.NewClient(control).Examine(ctx)
	if agentErr == nil && file == "" && a.ConfigFile != "" { // what runs may have another file
		cfg, err = config.LoadAgent(a.ConfigFile, nil, os.LookupEnv)
	}
	if err != nil {
		f.Config.Error = err.Error()
	} else {
		if agentErr == nil {
			cfg.LinkToken = a.TokenFile
		}
		f.Config = checkConfig(cfg)
	}
	if agentErr != nil {
		f.AgentError = agentErr.Error()
		if a, err = agent.Look(ctx, cfg, lookPatience); err != nil {
			f.LookError = err.Error()
			f.Gather(ctx, 0, agent.Dump)
			return f
		}
	}
	f.Agent = &a
	f.Gather(ctx, a.PID, agent.Dump)
	return f
}

func checkConfig(cfg config.Agent) doctor.Config {
	c := doctor.Config{File: cfg.File(), Rules: cfg.Rules.Len(), TokenFile: cfg.LinkToken}
	for _, e := range cfg.Link {
		c.NeedsToken = c.NeedsToken || e.Network != link.NetworkUnix
	}
	if c.TokenFile == "" {
		return c
	}
	if _, err := link.LoadToken(c.TokenFile); err != nil {
		c.TokenError = err.Error()
	}
	return c
}
