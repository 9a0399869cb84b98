// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/fairlead/fairlead/internal/config"
	"github.com/fairlead/fairlead/internal/rules"
	"github.com/fairlead/fairlead/internal/yamltree"
)

func newConfig() *cobra.Command {
	root := &cobra.Command{Use: "config", Short: "Check a configuration file, or print its JSON Schema", Args: noArgs, GroupID: groupCheck,
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() }}
	root.AddCommand(newConfigCheck(), &cobra.Command{
		Use: "schema", Short: "Print the JSON Schema of the configuration, for editors", Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			_, err := c.OutOrStdout().Write(config.Schema())
			return err
		},
	})
	return root
}

// checked is the output of "config check -o json".
type checked struct {
	File    string `json:"file"`
	OK      bool   `json:"ok"`
	Rules   int    `json:"rules"`
	Line    int    `json:"line,omitempty"` // of the error, from 1
	Column  int    `json:"column,omitempty"`
	Field   string `json:"field,omitempty"`
	Problem string `json:"problem,omitempty"`
}

func newConfigCheck() *cobra.Command {
	var host bool
	var out output
	c := &cobra.Command{
		Use:   "check FILE",
		Short: "Say whether a configuration file would be taken, and if not, where it is wrong",
		Args:  oneArg("a configuration file"),
		RunE: func(c *cobra.Command, args []string) error {
			if err := out.validate(); err != nil {
				return err
			}
			set, err := loadRules(args[0], host)
			if out.format == "json" {
				v := checked{File: args[0], OK: err == nil}
				var at *yamltree.Error
				switch {
				case err == nil:
					v.Rules = set.Len()
				case errors.As(err, &at):
					v.File, v.Line, v.Column, v.Field, v.Problem = at.File, at.Line, at.Column, at.Field, at.Reason
				default:
					v.Problem = err.Error()
				}
				return errors.Join(json.NewEncoder(c.OutOrStdout()).Encode(versioned(v)), err)
			}
			if err != nil {
				return err
			}
			_, err = fmt.Fprintf(c.OutOrStdout(), "%s: ok, %d rules\n", args[0], set.Len())
			return err
		},
	}
	c.Flags().BoolVar(&host, "host", false, "check a file of the host peer, not of the agent")
	out.register(c, "text", "json")
	return c
}

// loadRules loads a configuration file alone, without flags and environment.
func loadRules(path string, host bool) (*rules.Set, error) {
	if host {
		cfg, err := config.LoadHost(path, nil, nil)
		return cfg.Rules, err
	}
	cfg, err := config.LoadAgent(path, nil, nil)
	return cfg.Rules, err
}
