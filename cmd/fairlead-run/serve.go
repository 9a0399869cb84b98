// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/fairlead/fairlead/internal/config/privilege"
	"github.com/fairlead/fairlead/internal/guest/peer"
	"github.com/fairlead/fairlead/internal/guest/run"
	"github.com/fairlead/fairlead/internal/guest/run/policy"
)

func newServe() *cobra.Command {
	var file string
	var check bool
	c := &cobra.Command{
		Use:   policy.Serve,
		Short: "Run what the configuration lists for containers and users",
		Long: "Run what " + run.DefaultFile + " lists for containers and users of this machine. It needs root,\n" +
			"cgroup v2, Linux 5.14 and a running `fairlead agent`, which knows the containers.",
		Example: "  fairlead-run serve\n  fairlead-run serve --check --config run.yaml",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 0 {
				return usageError{fmt.Errorf("serve takes no argument, got %q", args[0])}
			}
			return nil
		},
		RunE: func(c *cobra.Command, _ []string) error {
			cfg, err := run.Load(file)
			if err != nil || check {
				return err
			}
			return serve(file, cfg, slog.New(slog.NewTextHandler(c.ErrOrStderr(), nil)))
		},
	}
	c.Flags().StringVar(&file, "config", run.DefaultFile, "path of the configuration")
	c.Flags().BoolVar(&check, "check", false, "only check the configuration")
	return c
}

// serve serves until SIGINT or SIGTERM.
func serve(file string, cfg run.Config, log *slog.Logger) error {
	if os.Geteuid() != 0 {
		return errors.New("serve starts programs as other users, which needs root")
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	reload := make(chan os.Signal, 1)
	signal.Notify(reload, syscall.SIGHUP)
	s := run.New(run.Options{
		Socket: cfg.Socket, Policy: cfg.Allow, Jobs: cfg.Jobs, Limits: peer.Limits{Uses: cfg.ClientJobs, Requests: cfg.ClientRequests},
		Container: run.AskAgent(cfg.Control, log), Logger: log,
	})
	if err := s.Start(); err != nil {
		return err
	}
	if err := privilege.Limit(privilege.RunServer()); err != nil {
		return err
	}
	go run.Watch(ctx, file, cfg, reload, func(next run.Config, err error) { apply(s, cfg, next, err, log) })
	return s.Run(ctx)
}

// apply takes a changed configuration as far as it can without a restart.
func apply(s *run.Server, was, next run.Config, err error, log *slog.Logger) {
	if err != nil {
		log.Error("configuration refused; keeping the previous one", "err", err)
		return
	}
	waiting := s.SetPolicy(next.Allow)
	log.Info("configuration reloaded", "entries", len(next.Allow))
	if waiting > 0 || !was.Same(next) {
		log.Warn("changes that need a restart", "entries", waiting, "settings", !was.Same(next))
	}
}
