// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/fairlead/fairlead/internal/config"
	"github.com/fairlead/fairlead/internal/config/rules"
	"github.com/fairlead/fairlead/internal/config/yamltree"
	"github.com/fairlead/fairlead/internal/status"
)

func newConfig() *cobra.Command {
	root := &cobra.Command{Use: "config", Short: "Show or check the configuration, print its JSON Schema, or set the log level", Args: noArgs, GroupID: groupCheck,
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() }}
	root.AddCommand(newConfigShow(), newConfigCheck(), newLogLevel(), &cobra.Command{
		Use: "schema", Short: "Print the JSON Schema of the configuration, for editors", Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			_, err := c.OutOrStdout().Write(config.Schema())
			return err
		},
	})
	return root
}

func newConfigShow() *cobra.Command {
	var file, control string
	var host bool
	var out output
	c := &cobra.Command{
		Use:   "show",
		Short: "Print the effective value of each setting, and where it comes from",
		Long: "Print the effective value of each setting, and where it comes from: a flag, an environment variable,\n" +
			"a line of a file, or the default. The values are those of the running agent or host peer; with --config,\n" +
			"or if none runs, those of a file and the environment.",
		Example: "  fairlead config show\n  fairlead config show --host --config host.yaml",
		Args:    noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := out.validate(); err != nil {
				return err
			}
			s, err := effective(c, file, control, host)
			if err != nil {
				return err
			}
			if out.format == "json" {
				return newEncoder(c.OutOrStdout()).Encode(versioned(s))
			}
			tw := tabwriter.NewWriter(c.OutOrStdout(), 0, 4, 2, ' ', 0)
			_, _ = fmt.Fprintf(tw, "KEY\tVALUE\tFROM\n")
			for _, v := range s.Settings {
				_, _ = fmt.Fprintf(tw, "%s\t%s\t%s\n", v.Key, status.Quote(cmp.Or(v.Value, "-")), status.Quote(v.From))
			}
			return tw.Flush()
		},
	}
	c.Flags().StringVar(&file, "config", "", "show this file instead of what runs")
	c.Flags().BoolVar(&host, "host", !canBeGuest, "show the host peer, not the agent")
	controlFlag(c, &control)
	out.register(c, "table", "json")
	return c
}

// effective asks what runs, or else reads a file and the environment.
func effective(c *cobra.Command, file, control string, host bool) (status.Settings, error) {
	if file == "" {
		at := cmp.Or(control, os.Getenv(config.ClientControl))
		if at == "" && host {
			at = config.DefaultHost().Control
		}
		s, err := client(at).Settings(c.Context())
		if err == nil || !errors.Is(err, status.ErrNotRunning) || control != "" {
			return s, err
		}
		_, _ = fmt.Fprintln(c.ErrOrStderr(), "fairlead: nothing runs here; these are the settings of a new start")
	}
	if host {
		cfg, err := config.LoadHost(file, nil, os.LookupEnv)
		return status.Settings{Role: "host", File: cfg.File(), Settings: cfg.Settings()}, err
	}
	cfg, err := config.LoadAgent(file, nil, os.LookupEnv)
	return status.Settings{Role: "agent", File: cfg.File(), Settings: cfg.Settings()}, err
}

// checked is the output of "config check -o json".
type checked struct {
	File     string    `json:"file"`
	OK       bool      `json:"ok"`
	Rules    int       `json:"rules"`
	Problems []problem `json:"problems"`
	Warnings []string  `json:"warnings"` // rules that never decide, and the like

	absent bool // there is no such file, and none is needed
}

// problem is one mistake.
type problem struct {
	File   string `json:"file"`
	Line   int    `json:"line,omitempty"` // from 1
	Column int    `json:"column,omitempty"`
	Field  string `json:"field,omitempty"`
	Text   string `json:"text"`

	line string // as an error
}

func newConfigCheck() *cobra.Command {
	var host bool
	var out output
	c := &cobra.Command{
		Use:   "check [FILE]",
		Short: "Check a configuration file and list its mistakes",
		Long: "Check a configuration file and list its mistakes: that which the agent or host peer reads at its start,\n" +
			"or another FILE.",
		Example: "  fairlead config check\n  fairlead config check --host host.yaml",
		Args: func(c *cobra.Command, args []string) error {
			if len(args) > 1 {
				return usageError{fmt.Errorf("%s takes at most one argument, a configuration file (see `%s --help`)", nameOf(c), c.CommandPath())}
			}
			return nil
		},
		RunE: func(c *cobra.Command, args []string) error {
			if err := out.validate(); err != nil {
				return err
			}
			host = host || len(args) == 0 && !canBeGuest
			path, optional := usualFile(host)
			if len(args) > 0 {
				path, optional = args[0], false
			}
			v := check(path, host)
			if _, err := os.Stat(path); optional && errors.Is(err, fs.ErrNotExist) {
				v = checked{File: path, OK: true, Problems: []problem{}, Warnings: []string{}, absent: true}
			}
			if out.format == "json" {
				if err := newEncoder(c.OutOrStdout()).Encode(versioned(v)); err != nil || v.OK {
					return err
				}
				return errNo
			}
			return v.write(c.OutOrStdout(), c.ErrOrStderr())
		},
	}
	c.Flags().BoolVar(&host, "host", false, "check a file of the host peer, not of the agent")
	out.register(c, "text", "json")
	return c
}

// usualFile is the configuration file that an agent or host peer reads at its start if no
// flag names one, and whether it may be absent.
func usualFile(host bool) (path string, optional bool) {
	if path = os.Getenv("FAIRLEAD_CONFIG"); path != "" {
		return path, false
	}
	if host {
		return config.DefaultHostFile(), true
	}
	return config.DefaultAgentFile, true
}

// check loads a file and collects its mistakes in the order of their lines.
func check(path string, host bool) checked {
	set, err := loadRules(path, host)
	v := checked{File: path, OK: err == nil, Problems: []problem{}, Warnings: []string{}}
	if err == nil {
		v.Rules = set.Len()
		v.Warnings = append(v.Warnings, set.Unreachable()...)
		v.Warnings = append(v.Warnings, set.OneFamily()...)
		return v
	}
	for _, err := range leaves(err) {
		p := problem{File: path, Text: err.Error(), line: err.Error()}
		if at, ok := errors.AsType[*yamltree.Error](err); ok {
			p.File, p.Line, p.Column, p.Field, p.Text = at.File, at.Line, at.Column, at.Field, at.Reason
		}
		v.Problems = append(v.Problems, p)
	}
	if _, err := loadRules(path, !host); err == nil {
		other := map[bool]string{false: "of the host peer: use --host", true: "of the agent: do not use --host"}
		v.Warnings = append(v.Warnings, "this is a valid file "+other[host])
	}
	slices.SortStableFunc(v.Problems, func(a, b problem) int { return cmp.Compare(a.Line, b.Line) })
	return v
}

// leaves returns the errors that were joined in err.
func leaves(err error) (list []error) {
	joined, ok := err.(interface{ Unwrap() []error })
	if !ok {
		return []error{err}
	}
	for _, e := range joined.Unwrap() {
		list = append(list, leaves(e)...)
	}
	return list
}

// write prints the result: mistakes on stderr, one per line.
func (v checked) write(stdout, stderr io.Writer) error {
	for _, p := range v.Problems {
		_, _ = fmt.Fprintf(stderr, "fairlead: %s\n", p.line)
	}
	for _, w := range v.Warnings {
		_, _ = fmt.Fprintf(stderr, "%s: warning: %s\n", v.File, w)
	}
	if !v.OK {
		return errNo
	}
	if v.absent {
		_, err := fmt.Fprintf(stdout, "%s: absent, so each setting has its default\n", v.File)
		return err
	}
	rules := fmt.Sprintf("%d rules", v.Rules)
	if v.Rules == 1 {
		rules = "1 rule"
	}
	_, err := fmt.Fprintf(stdout, "%s: ok, %s\n", v.File, rules)
	return err
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
