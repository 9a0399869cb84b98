// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/fairlead/fairlead/internal/config"
	"github.com/fairlead/fairlead/internal/config/loglevel"
	"github.com/fairlead/fairlead/internal/guest/agent"
	"github.com/fairlead/fairlead/internal/setup/demo"
	"github.com/fairlead/fairlead/internal/setup/dropin"
)

// start runs the program that args[0] names: started under the name of Rancher Desktop's
// agent, by a link or a copy, this one takes its flags.
func start(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	if filepath.Base(args[0]) == dropin.Name {
		return dropin.Run(ctx, args[1:], stderr, func(c config.Common) (*slog.Logger, *loglevel.Levels) {
			log, level := logger(stderr, c)
			warnUnknown(log)
			warnOverridden(log)
			return log, level
		})
	}
	return run(ctx, args[1:], stdout, stderr)
}

// warnOverridden warns about variables of older agents that fairlead's own override. Only
// the agent reads them.
func warnOverridden(log *slog.Logger) {
	warnVariables(log, config.OverriddenVariables(os.Environ()))
}

// platformCommands are the commands of the guest.
func platformCommands() []*cobra.Command {
	return []*cobra.Command{newAgent(), newPublish(), newDemo(), newDemoServer()}
}

func newAgent() *cobra.Command {
	var file string
	var flags config.Agent
	c := &cobra.Command{
		Use: "agent", Short: "Run the guest agent", Args: noArgs, GroupID: groupRun,
		Example: "  fairlead agent --link vsock://:1023\n  fairlead agent --config agent.yaml --log-level debug",
		RunE: func(c *cobra.Command, _ []string) error {
			load := func() (config.Agent, error) { return config.LoadAgent(file, c.Flags(), os.LookupEnv) }
			cfg, err := load()
			if err != nil {
				return usageError{err}
			}
			log, level := logger(c.ErrOrStderr(), cfg.Common)
			warnUnknown(log)
			warnOverridden(log)
			a, err := agent.New(cfg, log, level)
			if err != nil {
				return err
			}
			a.Confine()
			hup, stop := hangups()
			defer stop()
			return a.Run(c.Context(), func(ctx context.Context, onChange func(config.Agent, error)) {
				config.Watch(ctx, cfg, hup, load, onChange)
			})
		},
	}
	agentFlags(c.Flags(), &file, &flags)
	completeWords(c, flags.Words())
	c.AddCommand(newAgentInstall(), newAgentUninstall())
	return c
}

func agentFlags(fs *pflag.FlagSet, file *string, flags *config.Agent) {
	fs.StringVar(file, "config", "", "configuration file (default "+config.DefaultAgentFile+", which may be absent)")
	flags.Flags(fs)
}

func newDemo() *cobra.Command {
	var mode string
	c := &cobra.Command{
		Use:     "demo",
		Short:   "Show fairlead on this machine, with a network namespace as the guest",
		GroupID: groupRun,
		Example: "  fairlead demo\n  fairlead demo --observer poll",
		Args:    noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if mode != "auto" && mode != "bpf" && mode != "poll" {
				return usageError{fmt.Errorf("--observer %q: want auto, bpf or poll", mode)}
			}
			self, err := os.Executable()
			if err != nil {
				return err
			}
			return demo.Run(c.Context(), demo.Options{Self: self, Observer: mode, Out: c.OutOrStdout(), Err: c.ErrOrStderr()})
		},
	}
	c.Flags().StringVar(&mode, "observer", "auto", "how to observe sockets: auto, bpf or poll")
	return c
}

func newDemoServer() *cobra.Command {
	return &cobra.Command{
		Use: demo.ServerCommand + " KIND ADDRESS", Hidden: true, Args: cobra.ExactArgs(2),
		RunE: func(c *cobra.Command, args []string) error { return demo.Serve(c.Context(), args[0], args[1]) },
	}
}
