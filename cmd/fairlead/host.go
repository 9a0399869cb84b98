// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"os"

	"github.com/spf13/cobra"

	"github.com/fairlead/fairlead/internal/config"
	"github.com/fairlead/fairlead/internal/hostd"
)

func newHost() *cobra.Command {
	var file string
	var flags config.Host
	c := &cobra.Command{
		Use: "host", Short: "Run the host peer: open here what guests publish", Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			load := func() (config.Host, error) { return config.LoadHost(file, c.Flags(), os.LookupEnv) }
			cfg, err := load()
			if err != nil {
				return usageError{err}
			}
			log, level := logger(c.ErrOrStderr(), cfg.Common)
			d, err := hostd.New(cfg, log, level)
			if err != nil {
				return err
			}
			hup, stop := hangups()
			defer stop()
			return d.Run(c.Context(), func(ctx context.Context, onChange func(config.Host, error)) {
				config.Watch(ctx, cfg, hup, load, onChange)
			})
		},
	}
	c.Flags().StringVar(&file, "config", "", "configuration file (default "+config.DefaultHostFile()+", which may be absent)")
	flags.Flags(c.Flags())
	return c
}
