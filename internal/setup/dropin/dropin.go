// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package dropin is a drop-in for Rancher Desktop's guest agent: it accepts the same
// flags and runs fairlead's agent with the corresponding ones.
package dropin

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/pflag"

	"github.com/fairlead/fairlead/internal/config"
	"github.com/fairlead/fairlead/internal/config/loglevel"
	"github.com/fairlead/fairlead/internal/guest/agent"
)

// Exit codes.
const (
	exitOK    = 0
	exitError = 1
	exitUsage = 2
)

// Name is the name of the program that this one replaces, and by which it is started.
const Name = "rancher-desktop-guestagent"

// Run runs the agent until ctx ends, with the flags of Rancher Desktop's agent, and
// returns the exit status. Errors go to stderr; newLog makes the log of a configuration,
// and its level, which can be changed.
func Run(ctx context.Context, args []string, stderr io.Writer, newLog func(config.Common) (*slog.Logger, *loglevel.Levels)) int {
	fail := func(code int, err error) int {
		_, _ = fmt.Fprintf(stderr, "%s: %s\n", Name, strings.ReplaceAll(err.Error(), "\n", "; "))
		return code
	}
	o, err := parse(args, stderr)
	if errors.Is(err, flag.ErrHelp) {
		return exitOK
	}
	if err != nil {
		return fail(exitUsage, err)
	}
	p, err := o.translate()
	if err != nil {
		return fail(exitUsage, err)
	}
	if os.Geteuid() != 0 {
		return fail(exitError, errors.New("must run as root"))
	}
	fs := pflag.NewFlagSet("agent", pflag.ContinueOnError)
	new(config.Agent).Flags(fs)
	if err := fs.Parse(p.flags); err != nil {
		return fail(exitUsage, err)
	}
	load := func() (config.Agent, error) { return config.LoadAgent("", fs, os.LookupEnv, p.rules...) }
	cfg, err := load()
	if err != nil {
		return fail(exitUsage, err)
	}
	log, level := newLog(cfg.Common)
	log.Info("replacing Rancher Desktop's guest agent", "mode", p.mode, "flags", strings.Join(p.flags, " "))
	a, err := agent.New(cfg, log, level)
	if err != nil {
		return fail(exitError, err)
	}
	a.Confine()
	hup := make(chan os.Signal, 1)
	signal.Notify(hup, syscall.SIGHUP)
	defer signal.Stop(hup)
	err = a.Run(ctx, func(ctx context.Context, onChange func(config.Agent, error)) {
		config.Watch(ctx, cfg, hup, load, onChange)
	})
	if err != nil && ctx.Err() == nil {
		return fail(exitError, err)
	}
	return exitOK
}
