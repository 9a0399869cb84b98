// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os"
	"slices"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/fairlead/fairlead/internal/config"
	"github.com/fairlead/fairlead/internal/setup/agentinstall"
	"github.com/fairlead/fairlead/internal/setup/hostinstall"
)

var errNotRoot = errors.New("must run as root")

func newAgentInstall() *cobra.Command {
	return &cobra.Command{
		Use:   "install [-- AGENT FLAGS]",
		Short: "Start the agent now and with the machine",
		Long: "Start the agent now and with the machine, where no package does: by a unit of systemd, a service of OpenRC,\n" +
			"or the boot command in WSL's /etc/wsl.conf. Flags after -- are passed to `fairlead agent`.",
		Example: "  fairlead agent install -- --link vsock://:1023",
		Args:    cobra.ArbitraryArgs,
		RunE: func(c *cobra.Command, args []string) error {
			o, missing, err := atBoot(args)
			if err != nil {
				return err
			}
			init, err := agentinstall.Install(c.Context(), o)
			return report(c.OutOrStdout(), agentInstalled(init, o.Program)+missing.note(), err)
		},
	}
}

func newAgentUninstall() *cobra.Command {
	return &cobra.Command{
		Use: "uninstall", Short: "Stop the agent, and do not start it with the machine any more", Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if os.Geteuid() != 0 {
				return fmt.Errorf("uninstall: %w", errNotRoot)
			}
			self, err := os.Executable()
			if err != nil {
				return err
			}
			r, err := agentinstall.Uninstall(c.Context(), agentinstall.Options{Root: "/", Program: self, Run: hostinstall.Machine{}.Run, Control: controlOf})
			return report(c.OutOrStdout(), agentUninstalled(r), err)
		},
	}
}

// agentUninstalled says what was done.
func agentUninstalled(r agentinstall.Removed) string {
	const kept = "Configuration, token and log were kept, in /etc/fairlead, /var/lib/fairlead and /var/log/fairlead.log."
	switch {
	case !r.Found:
		return "Nothing to uninstall: `fairlead agent install` installed nothing here."
	case r.Runs != nil:
		return fmt.Sprintf("Uninstalled. The agent runs until `wsl --shutdown` in Windows: %v.\n%s", r.Runs, kept)
	case r.Ended != 0:
		return fmt.Sprintf("Uninstalled, and ended the agent, process %d. %s", r.Ended, kept)
	}
	return "Uninstalled. " + kept
}

// controlOf returns the path of the control socket of an agent that has these flags. Where
// its configuration cannot be read, that is the usual one.
func controlOf(args []string) string {
	fs := pflag.NewFlagSet("agent", pflag.ContinueOnError)
	var file string
	agentFlags(fs, &file, new(config.Agent))
	cfg, err := config.Agent{}, fs.Parse(args)
	if err == nil {
		cfg, err = config.LoadAgent(file, fs, func(string) (string, bool) { return "", false })
	}
	if err != nil {
		return config.DefaultAgent().Control
	}
	return cfg.Control
}

// agentInstalled says what runs now, and how to see it.
func agentInstalled(init agentinstall.Init, program string) string {
	now, log := "now and with the machine", "journalctl -u fairlead-agent"
	switch init {
	case agentinstall.OpenRC:
		log = "/var/log/fairlead.log"
	case agentinstall.WSL:
		now, log = "when the distribution starts: run `wsl --shutdown` in Windows once", "/var/log/fairlead.log"
	}
	return fmt.Sprintf("Installed: %s runs %s. Leave it where it is.\nLog: %s\nNext: fairlead doctor", program, now, log)
}

// atBoot describes this program with flags for "agent", which it validates, and returns the
// variables that it will not have.
func atBoot(args []string) (agentinstall.Options, unseen, error) {
	fs := pflag.NewFlagSet("agent", pflag.ContinueOnError)
	var file string
	agentFlags(fs, &file, new(config.Agent))
	err := fs.Parse(args)
	if err == nil && fs.NArg() > 0 {
		err = fmt.Errorf("%q: want flags only", fs.Arg(0))
	}
	if err == nil {
		err = absolute(fs)
	}
	var missing unseen
	var cfg config.Agent
	if err == nil {
		cfg, err = config.LoadAgent(file, fs, missing.lookup)
	}
	if err != nil {
		return agentinstall.Options{}, nil, usageError{fmt.Errorf("for `fairlead agent`: %w", flagError(err))}
	}
	if slices.ContainsFunc(cfg.Link, func(e config.Endpoint) bool { return e.Server != "" }) { // it dials out
		for _, name := range []string{"HTTPS_PROXY", "https_proxy", "NO_PROXY", "no_proxy"} {
			missing.lookup(name)
		}
	}
	if os.Geteuid() != 0 {
		return agentinstall.Options{}, missing, fmt.Errorf("install: %w", errNotRoot)
	}
	self, err := os.Executable()
	return agentinstall.Options{Root: "/", Program: self, Args: append([]string{"agent"}, args...), Run: hostinstall.Machine{}.Run, Control: controlOf}, missing, err
}
