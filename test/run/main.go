// SPDX-License-Identifier: Apache-2.0

// Run runs one stage of the tests, shows it readably and adds its counts to the
// tally file that FAIRLEAD_TALLY names.
//
//	go run ./test/run test  STAGE go test -json ...   a command that prints test events
//	go run ./test/run check STAGE COMMAND...          any other command: one check
//	go run ./test/run sum   FILE                      what failed in a tally and, as last line, its sum
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"syscall"
	"time"

	"github.com/fairlead/fairlead/test/report"
)

const usage = `usage: run test|check STAGE COMMAND...
       run sum FILE`

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	var count report.Count
	var err error
	switch args := os.Args[1:]; {
	case len(args) == 2 && args[0] == "sum":
		count, err = sum(os.Stdout, args[1])
	case len(args) > 2 && (args[0] == "test" || args[0] == "check"):
		r := &report.Reporter{Out: os.Stdout}
		err = stage(ctx, r, args[0] == "test", args[1], args[2:])
		err = errors.Join(err, r.Append(os.Getenv("FAIRLEAD_TALLY"), args[1]))
		count = r.Count()
	default:
		fmt.Fprintln(os.Stderr, usage)
		os.Exit(2)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "run:", err)
	}
	if err != nil || count.Failed > 0 {
		os.Exit(1)
	}
}

func sum(out io.Writer, file string) (report.Count, error) {
	f, err := os.Open(file)
	if err != nil {
		return report.Count{}, err
	}
	defer f.Close()
	count, err := report.Sum(out, f)
	if err != nil {
		return count, err
	}
	_, err = fmt.Fprintln(out, count)
	return count, err
}

// stage runs command and reports to r. A command that fails although no test did
// counts as one failure.
func stage(ctx context.Context, r *report.Reporter, events bool, name string, command []string) error {
	start := time.Now()
	cmd := exec.CommandContext(ctx, command[0], command[1:]...)
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 10 * time.Second
	cmd.Stdout, cmd.Stderr = r.Out, os.Stderr
	var err error
	if events {
		err = read(r, cmd)
	} else {
		err = cmd.Run()
		r.Check(fmt.Sprintf("%s (%.1fs)", name, time.Since(start).Seconds()), err)
	}
	if err != nil && r.Count().Failed == 0 {
		r.Check(name, err)
	}
	if !events {
		return nil
	}
	_, err = fmt.Fprintf(r.Out, "%s: %s (%.1fs)\n", name, r.Count(), time.Since(start).Seconds())
	return err
}

func read(r *report.Reporter, cmd *exec.Cmd) error {
	cmd.Stdout = nil
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	err = r.Read(stdout)
	err = errors.Join(err, cmd.Wait())
	r.End()
	return err
}
