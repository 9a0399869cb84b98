// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Command fairlead-run has programs of this machine run for its containers and users, if its
// configuration lists them. It is the client and, as "fairlead-run serve", the service.
package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/fairlead/fairlead/internal/guest/run"
	"github.com/fairlead/fairlead/internal/status/version"
)

// Exit statuses; a program that is run has the others.
const (
	exitOK     = 0
	exitError  = 1
	exitUsage  = 2
	exitNotRun = 125
)

func main() {
	inner, err := run.Inner(os.Args[1:])
	switch {
	case !inner:
		os.Exit(execute(os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
	case err != nil:
		_, _ = fmt.Fprintf(os.Stderr, "fairlead-run: %v\n", err)
		os.Exit(exitError)
	}
}

// jobStatus is the exit status of a program that was run. It becomes this process's.
type jobStatus int

func (e jobStatus) Error() string { return fmt.Sprintf("exit status %d", int(e)) }

// runError is why a program was not run, or how it ended is not known.
type runError struct{ error }

func (e runError) Unwrap() error { return e.error }

// usageError is a wrong command line.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

func execute(args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	root := newRoot()
	root.SetArgs(args)
	root.SetIn(stdin)
	root.SetOut(stdout)
	root.SetErr(stderr)
	err := root.Execute()
	if err == nil {
		return exitOK
	}
	if status, ok := errors.AsType[jobStatus](err); ok {
		return int(status)
	}
	_, _ = fmt.Fprintf(stderr, "fairlead-run: %s\n", strings.ReplaceAll(err.Error(), "\n", "; "))
	if _, ok := errors.AsType[usageError](err); ok {
		return exitUsage
	}
	if _, ok := errors.AsType[runError](err); ok {
		return exitNotRun
	}
	return exitError
}

func newRoot() *cobra.Command {
	c := newClient()
	c.SilenceUsage, c.SilenceErrors = true, true
	c.CompletionOptions.DisableDefaultCmd = true
	c.SetHelpCommand(&cobra.Command{Use: "no-help", Hidden: true}) // `help` may be a program's name
	c.SetFlagErrorFunc(func(c *cobra.Command, err error) error {
		return usageError{fmt.Errorf("%w (see `%s --help`)", err, c.CommandPath())}
	})
	c.AddCommand(newServe())
	// cobra's own flag needs a template for this text.
	c.Flags().BoolP("version", "v", false, "print the version")
	return c
}

// printVersion reports whether the version was asked for, and prints it.
func printVersion(c *cobra.Command) bool {
	asked, _ := c.Flags().GetBool("version")
	if asked {
		_, _ = fmt.Fprintf(c.OutOrStdout(), "fairlead-run %s\n", version.String())
	}
	return asked
}
