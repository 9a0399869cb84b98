// SPDX-License-Identifier: Apache-2.0

// Command fairlead is the guest agent, the host peer and their command line.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/fairlead/fairlead/internal/status/version"
)

// Exit statuses. "No" is a failure: explain of a port that is not reachable.
const (
	exitOK    = 0
	exitError = 1
	exitUsage = 2
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := start(ctx, os.Args, os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

// errNo is the answer "no" of a command that has printed why. It only sets the exit
// status.
var errNo = errors.New("no")

// usageError is a wrong command line.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	root := newRoot()
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	checkCompletionArgs(root)
	err := root.ExecuteContext(ctx)
	if err == nil || errors.Is(err, context.Canceled) && ctx.Err() != nil {
		return exitOK
	}
	if errors.Is(err, errNo) {
		return exitError
	}
	_, _ = fmt.Fprintf(stderr, "fairlead: %s\n", strings.ReplaceAll(err.Error(), "\n", "; "))
	var usage usageError
	if errors.As(err, &usage) {
		return exitUsage
	}
	return exitError
}

func newRoot() *cobra.Command {
	var showVersion bool
	root := &cobra.Command{
		Use:   "fairlead",
		Short: "Make the ports of a Linux VM reachable on its host's localhost the moment they open",
		Long: "Make the ports of a Linux VM reachable on its host's localhost the moment they open.\n\n" +
			"Run `fairlead agent` in the VM and `fairlead host` on the host.\n\n" +
			"Exit status: 0 success, 1 failure or the answer \"no\", 2 usage error.",
		Example:       "  fairlead ls\n  fairlead explain 8080",
		SilenceUsage:  true,
		SilenceErrors: true,
		Args: func(c *cobra.Command, args []string) error {
			if showVersion {
				return nil
			}
			return noArgs(c, args)
		},
		RunE: func(c *cobra.Command, _ []string) error {
			if showVersion {
				_, err := fmt.Fprintf(c.OutOrStdout(), "fairlead %s\n", version.String())
				return err
			}
			return c.Help()
		},
	}
	// cobra's own flag needs a template for this text. A program that can execute
	// templates keeps every method of every type: 7 MB more.
	root.Flags().BoolVarP(&showVersion, "version", "v", false, "version for fairlead")
	root.SetFlagErrorFunc(func(c *cobra.Command, err error) error {
		err = flagError(err)
		if _, unknown := errors.AsType[*pflag.NotExistError](err); unknown && c.Name() == "install" {
			err = fmt.Errorf("%w: put flags of `%s` after --, as in `%s -- --log-level debug`", err, c.Parent().CommandPath(), c.CommandPath())
		}
		return usageError{fmt.Errorf("%w (see `%s --help`)", err, c.CommandPath())}
	})
	root.AddGroup(groups()...)
	root.AddCommand(newHost(), newLs(), newWatch(), newOpen(), newExplain(), newTrace(), newForward(), newDeny(), newAllow(), newExpose(), newConfig(), newDoctor(), newWeb(), newMan(), newVersion())
	root.AddCommand(platformCommands()...)
	root.SetHelpCommand(newHelp())
	return root
}

// The groups of commands.
const (
	groupRun     = "run"
	groupInspect = "inspect"
	groupChange  = "change"
	groupCheck   = "check"
)

func groups() []*cobra.Group {
	return []*cobra.Group{
		{ID: groupRun, Title: "Run:"},
		{ID: groupInspect, Title: "See the ports:"},
		{ID: groupChange, Title: "Change what is forwarded:"},
		{ID: groupCheck, Title: "Configure and diagnose:"},
	}
}

// flagError returns err without the repetition of the value, which the errors of our
// own settings name already.
func flagError(err error) error {
	var invalid *pflag.InvalidValueError
	if errors.As(err, &invalid) && strings.HasPrefix(invalid.Unwrap().Error(), strconv.Quote(invalid.GetValue())) {
		return fmt.Errorf("--%s %w", invalid.GetFlag().Name, invalid.Unwrap())
	}
	return err
}

func newHelp() *cobra.Command {
	return &cobra.Command{
		Use: "help [COMMAND]", Short: "Help about a command",
		RunE: func(c *cobra.Command, args []string) error {
			about, rest, err := c.Root().Find(args)
			if err == nil && len(rest) > 0 {
				err = fmt.Errorf("unknown command %q (see `%s --help`)", strings.Join(args, " "), c.Root().Name())
			}
			if err != nil {
				return usageError{err}
			}
			return about.Help()
		},
	}
}

// noArgs refuses arguments, and unknown commands.
func noArgs(c *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	if c.HasSubCommands() {
		c.SuggestionsMinimumDistance = 2
		hint := ""
		if near := c.SuggestionsFor(args[0]); len(near) > 0 {
			hint = fmt.Sprintf(": did you mean %q?", near[0])
		}
		return usageError{fmt.Errorf("unknown command %q for %q%s (see `%s --help`)", args[0], c.CommandPath(), hint, c.CommandPath())}
	}
	return usageError{fmt.Errorf("%s takes no argument, got %q", nameOf(c), args[0])}
}

// checkCompletionArgs adds the command that prints completions, whose output must be set
// by now, and has it refuse wrong arguments as our own commands do.
func checkCompletionArgs(root *cobra.Command) {
	root.InitDefaultCompletionCmd()
	completion, _, err := root.Find([]string{"completion"})
	if err != nil {
		return
	}
	completion.RunE = func(c *cobra.Command, _ []string) error { return c.Help() }
	for _, c := range append(completion.Commands(), completion) {
		c.Args = noArgs
	}
}

// nameOf returns the name of a command without the program's, which begins each error.
func nameOf(c *cobra.Command) string {
	return strings.TrimPrefix(c.CommandPath(), c.Root().Name()+" ")
}

func oneArg(what string) cobra.PositionalArgs {
	return func(c *cobra.Command, args []string) error {
		if len(args) != 1 {
			return usageError{fmt.Errorf("%s takes one argument, %s (see `%s --help`)", nameOf(c), what, c.CommandPath())}
		}
		return nil
	}
}
