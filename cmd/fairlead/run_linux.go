// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"github.com/fairlead/fairlead/internal/publish"
	program "github.com/fairlead/fairlead/internal/run"
)

func newRun() *cobra.Command {
	var q program.Request
	var socket string
	c := &cobra.Command{
		Use:   "run NAME [-- ARGS]",
		Short: "In a container, run a program of the guest that its configuration lists",
		Long: "In a container, run a program of the guest that `run.allow` of the agent's configuration lists\n" +
			"for this container, with these arguments. Input, output, signals and the exit status are the\n" +
			"program's. There is no shell. When this command ends, the program and all that it started are\n" +
			"killed.\n\n" +
			"Exit status: the program's, 128+N if signal N killed it, 125 if it was not run, 2 usage error.",
		Example: "  fairlead run backup\n  fairlead run backup -e LANG=C -- --full shop",
		GroupID: groupRun,
		Args: func(c *cobra.Command, args []string) error {
			if n := c.ArgsLenAtDash(); n >= 0 && n != 1 || n < 0 && len(args) != 1 {
				return usageError{fmt.Errorf("%s takes a NAME, and the program's arguments after -- (see `%s --help`)", c.CommandPath(), c.CommandPath())}
			}
			return nil
		},
		RunE: func(c *cobra.Command, args []string) error {
			q.Name, q.Args = args[0], args[1:]
			if err := checkTexts(&q); err != nil {
				return usageError{err}
			}
			return runProgram(c, socket, q)
		},
	}
	c.Flags().StringArrayVarP(&q.Env, "env", "e", nil, "set a variable, KEY=VALUE, or KEY for its value here (can be repeated)")
	c.Flags().StringVar(&socket, "socket", publish.DefaultSocket, "path of the agent's socket in this container")
	return c
}

// checkTexts completes the variables, and refuses what a message cannot carry.
func checkTexts(q *program.Request) error {
	for i, v := range q.Env {
		if !strings.Contains(v, "=") {
			value, ok := os.LookupEnv(v)
			if !ok {
				return fmt.Errorf("--env %s: it is not set here", v)
			}
			q.Env[i] = v + "=" + value
		}
	}
	for _, s := range append(append([]string{q.Name}, q.Args...), q.Env...) {
		if !utf8.ValidString(s) {
			return fmt.Errorf("%q is not UTF-8", s)
		}
	}
	return nil
}

// runProgram runs a program with this process's streams.
func runProgram(c *cobra.Command, socket string, q program.Request) error {
	// The program gets the signals, and how it ends decides how this one does.
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGTERM, syscall.SIGUSR1, syscall.SIGUSR2)
	defer signal.Stop(signals)
	exit, err := program.Do(context.WithoutCancel(c.Context()), socket, q, program.Streams{
		Stdin: c.InOrStdin(), Stdout: c.OutOrStdout(), Stderr: c.ErrOrStderr(), Signals: signals,
	})
	switch {
	case err != nil:
		return runError{fmt.Errorf("run %s: %w", q.Name, err)}
	case exit.Signal != 0:
		return jobStatus(128 + int(exit.Signal))
	case exit.Code != 0:
		return jobStatus(exit.Code)
	}
	return nil
}

// newRunHelper is what the agent starts for run.allow before it drops its capabilities.
func newRunHelper() *cobra.Command {
	return &cobra.Command{
		Use: program.HelperCommand, Hidden: true, Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error { return program.Help(c.InOrStdin()) },
	}
}
