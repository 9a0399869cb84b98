// SPDX-License-Identifier: Apache-2.0

// Command fairlead is guest agent, host peer and command line in one binary.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/fairlead/fairlead/internal/notices"
	"github.com/fairlead/fairlead/internal/version"
)

// Exit codes.
const (
	exitOK    = 0
	exitError = 1
	exitUsage = 2
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

// usageError is an error of the command line itself.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	root := newRoot()
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	err := root.ExecuteContext(ctx)
	if err == nil || errors.Is(err, context.Canceled) && ctx.Err() != nil {
		return exitOK
	}
	_, _ = fmt.Fprintf(stderr, "fairlead: %s\n", strings.ReplaceAll(err.Error(), "\n", "; "))
	var usage usageError
	if errors.As(err, &usage) {
		return exitUsage
	}
	return exitError
}

func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:           "fairlead",
		Short:         "Ports of a Linux VM on its host's localhost, the moment they exist",
		Version:       version.String(),
		SilenceUsage:  true,
		SilenceErrors: true,
		Args:          noArgs,
		RunE:          func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	root.SuggestionsMinimumDistance = 2
	root.SetVersionTemplate("fairlead {{.Version}}\n")
	root.SetFlagErrorFunc(func(c *cobra.Command, err error) error {
		return usageError{fmt.Errorf("%w (see `%s --help`)", err, c.CommandPath())}
	})
	root.AddCommand(newHost(), newLs(), newWatch(), newExplain(), newRules(), newConfig(), newLogLevel(), newWeb(), newMan(), newVersion())
	root.AddCommand(platformCommands()...)
	return root
}

// noArgs refuses arguments, and a command that does not exist, as misuse.
func noArgs(c *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	if c.HasSubCommands() {
		hint := ""
		if near := c.SuggestionsFor(args[0]); len(near) > 0 {
			hint = fmt.Sprintf(": did you mean %q?", near[0])
		}
		return usageError{fmt.Errorf("unknown command %q for %q%s (see `%s --help`)", args[0], c.CommandPath(), hint, c.CommandPath())}
	}
	return usageError{fmt.Errorf("%s takes no argument, got %q", c.CommandPath(), args[0])}
}

func oneArg(what string) cobra.PositionalArgs {
	return func(c *cobra.Command, args []string) error {
		if len(args) != 1 {
			return usageError{fmt.Errorf("%s takes one argument, %s (see `%s --help`)", c.CommandPath(), what, c.CommandPath())}
		}
		return nil
	}
}

func newVersion() *cobra.Command {
	var licenses bool
	c := &cobra.Command{
		Use: "version", Short: "Print the version, or the licences of all that this program contains", Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if licenses {
				return notices.Write(c.OutOrStdout())
			}
			_, err := fmt.Fprintf(c.OutOrStdout(), "fairlead %s\n", version.String())
			return err
		},
	}
	c.Flags().BoolVar(&licenses, "licenses", false, "print the licences of fairlead and of the libraries in it")
	return c
}
