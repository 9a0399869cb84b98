// SPDX-License-Identifier: Apache-2.0

//go:build linux

package gather

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"os"
	"time"

	"github.com/fairlead/fairlead/internal/config"
	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/status/doctor"
	"github.com/fairlead/fairlead/internal/status/version"
)

// Options say whom to ask. All but Ask and Look may be empty.
type Options struct {
	ConfigFile string // of the agent
	Control    string // its control socket; by default that of its configuration

	// Ask asks the agent at a control socket. Where that is not allowed, the error is
	// fs.ErrPermission.
	Ask func(ctx context.Context, control string) (doctor.Agent, error)
	// Look finds out what an agent with that configuration would see. It is called
	// if none answers.
	Look func(context.Context, config.Agent) (doctor.Agent, error)
	// Try does a self-test, beside the agent if one answers at the control socket, which is empty
	// otherwise. It is nil if none is wanted.
	Try func(ctx context.Context, cfg config.Agent, control string) doctor.SelfTest
}

// Facts returns all that package doctor judges, from the running agent or else
// from a look of our own.
func Facts(ctx context.Context, o Options) doctor.Facts {
	f := doctor.Facts{Version: version.String(), Now: time.Now()}
	file := o.ConfigFile
	cfg, err := config.LoadAgent(file, nil, os.LookupEnv)
	if err != nil {
		cfg = config.DefaultAgent()
	}
	control := cmp.Or(o.Control, os.Getenv(config.ClientControl), cfg.Control)
	a, agentErr := o.Ask(ctx, control)
	if agentErr == nil { // the running agent may use another file, and has flags
		file = cmp.Or(o.ConfigFile, a.ConfigFile)
		cfg, err = config.LoadAgent(file, nil, config.Given(a.Settings))
	} else {
		control = ""
	}
	if err != nil {
		f.Config.File, f.Config.Error = file, err.Error()
	} else {
		f.Config = examineConfig(cfg)
	}
	if o.Try != nil {
		tried := o.Try(ctx, cfg, control)
		f.Tried = &tried
	}
	if agentErr != nil {
		f.AgentError = agentErr.Error()
		if errors.Is(agentErr, fs.ErrPermission) {
			f.Denied = true
			Machine(ctx, &f, 0)
			return f
		}
		if a, err = o.Look(ctx, cfg); err != nil {
			f.LookError = err.Error()
			Machine(ctx, &f, 0)
			return f
		}
	}
	f.Agent = &a
	Machine(ctx, &f, a.PID)
	return f
}

func examineConfig(cfg config.Agent) doctor.Config {
	c := doctor.Config{File: cfg.File(), Rules: cfg.Rules.Len(), TokenFile: cfg.TokenFile()}
	for _, e := range cfg.Link {
		c.NeedsToken = c.NeedsToken || e.Network != link.NetworkUnix
	}
	if c.TokenFile == "" {
		return c
	}
	if _, err := link.LoadToken(c.TokenFile); err != nil {
		c.TokenError, c.TokenHeld = err.Error(), errors.Is(err, fs.ErrPermission)
	}
	return c
}
