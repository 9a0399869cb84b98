// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/fairlead/fairlead/internal/guest/run"
)

func newClient() *cobra.Command {
	var q run.Request
	var socket string
	var tty bool
	c := &cobra.Command{
		Use:   "fairlead-run NAME [-- ARGS]",
		Short: "In a container, run a program of the machine that its configuration lists",
		Long: "In a container, run a program of the machine that " + run.DefaultFile + " lists for this\n" +
			"container, with these arguments. Input, output, signals and the exit status are the program's.\n" +
			"There is no shell. When this command ends, the program and all that it started are killed.\n\n" +
			"With --tty the program gets a terminal of its own, as large as the one here and of the type $TERM.\n" +
			"Keys such as Ctrl-C go to the program.\n\n" +
			"Exit status: the program's, 128+N if signal N killed it, 125 if it was not run, 2 usage error.",
		Example: "  fairlead-run backup\n  fairlead-run backup -e LANG=C -- --full shop\n  fairlead-run -t top",
		Args: func(c *cobra.Command, args []string) error {
			if asked, _ := c.Flags().GetBool("version"); asked {
				return nil
			}
			if n := c.ArgsLenAtDash(); n >= 0 && n != 1 || n < 0 && len(args) != 1 {
				return usageError{errors.New("want a NAME, and the program's arguments after -- (see `fairlead-run --help`)")}
			}
			return nil
		},
		RunE: func(c *cobra.Command, args []string) error {
			if printVersion(c) {
				return nil
			}
			q.Name, q.Args = args[0], args[1:]
			if err := checkTexts(&q); err != nil {
				return usageError{err}
			}
			return runProgram(c, socket, q, tty)
		},
	}
	c.Flags().StringArrayVarP(&q.Env, "env", "e", nil, "set a variable, KEY=VALUE, or KEY for its value here (can be repeated)")
	c.Flags().BoolVarP(&tty, "tty", "t", false, "give the program a terminal, which its entry must allow")
	c.Flags().StringVar(&socket, "socket", run.DefaultSocket, "path of the service's socket in this container")
	return c
}

// checkTexts completes the variables, and refuses what a message cannot carry.
func checkTexts(q *run.Request) error {
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
func runProgram(c *cobra.Command, socket string, q run.Request, tty bool) error {
	// The program gets the signals, and how it ends decides how this one does.
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGTERM, syscall.SIGUSR1, syscall.SIGUSR2)
	defer signal.Stop(signals)
	streams := run.Streams{Stdin: c.InOrStdin(), Stdout: c.OutOrStdout(), Stderr: c.ErrOrStderr(), Signals: signals}
	ctx := context.Background()
	if tty {
		file, ok := streams.Stdin.(*os.File)
		if !ok || !term.IsTerminal(int(file.Fd())) {
			return runError{fmt.Errorf("%s: --tty: the input is no terminal: run it at one, or without --tty", q.Name)}
		}
		changed := make(chan os.Signal, 1)
		signal.Notify(changed, syscall.SIGWINCH, syscall.SIGCONT)
		defer signal.Stop(changed)
		streams.Screen = &run.Screen{File: file, Changed: changed}
		var stop context.CancelFunc
		ctx, stop = signal.NotifyContext(ctx, deadly()...)
		defer stop()
	}
	exit, err := run.Do(ctx, socket, q, streams)
	switch {
	case err != nil:
		return runError{fmt.Errorf("%s: %w", q.Name, err)}
	case exit.Signal != 0:
		if exit.Limit != "" {
			_, _ = fmt.Fprintf(c.ErrOrStderr(), "fairlead-run: %s: killed for its limit of %s\n", q.Name, exit.Limit)
		}
		return jobStatus(128 + int(exit.Signal))
	case exit.Code != 0:
		return jobStatus(exit.Code)
	}
	return nil
}

// deadly are the signals that end this process at once, by default, and can be caught. The
// terminal would remain in raw mode.
func deadly() []os.Signal {
	return []os.Signal{
		syscall.SIGABRT, syscall.SIGALRM, syscall.SIGBUS, syscall.SIGFPE, syscall.SIGILL, syscall.SIGIO, syscall.SIGPIPE, syscall.SIGPWR,
		syscall.SIGSEGV, syscall.SIGSTKFLT, syscall.SIGSYS, syscall.SIGTRAP, syscall.SIGVTALRM, syscall.SIGXCPU, syscall.SIGXFSZ,
	}
}
