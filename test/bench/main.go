// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Command bench compares fairlead with its own polling mode, and its link with other
// ways to carry bytes. Both sides are measured in one run, so that other load on the
// machine affects them alike. It writes the results as JSON lines, and a report with
// tables and figures. It needs root and works in network namespaces of its own.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/test/kit/enclave"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:], os.Stdout, os.Stderr); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// run is the program. The report goes to out if no directory is given; progress goes
// to log.
func run(ctx context.Context, args []string, out, log io.Writer) error {
	fs := flag.NewFlagSet("bench", flag.ContinueOnError)
	fs.SetOutput(log)
	size := fs.String("scale", "full", "how much to measure: full, quick or tiny (seconds; shows that it works)")
	all := strings.Join(names(parts()), ",")
	only := fs.String("only", all, "the parts to measure, separated by commas")
	jsonl := fs.String("json", os.DevNull, "write the results as JSON lines to this file")
	dir := fs.String("report", "", "write README.md and figures to this directory instead of tables to standard output")
	render := fs.String("render", "", "measure nothing, and report this file of JSON lines")
	emit := fs.Bool("emit", false, "write samples to standard output instead of a report; for internal use")
	relay := fs.String("relay", "", "be a relay of the part flows; for internal use")
	if err := fs.Parse(args); err != nil {
		return err
	}
	scale := scale(slices.Index(scales, *size))
	chosen, err := choose(*only)
	switch {
	case *relay != "":
		return runRelay(ctx, *relay)
	case *render != "":
		res, err := readResults(*render)
		if err != nil {
			return err
		}
		return writeReport(out, *dir, res)
	case scale < 0:
		return fmt.Errorf("-scale %q: want one of %s", *size, strings.Join(scales, ", "))
	case err != nil:
		return err
	case *emit:
		_, err := measureAll(ctx, chosen, scale, log, out)
		return err
	}
	res, err := measureAll(ctx, chosen, scale, log, io.Discard)
	if res == nil {
		return err
	}
	return errors.Join(err, res.write(*jsonl), writeReport(out, *dir, res))
}

func names(ps []part) (out []string) {
	for _, p := range ps {
		out = append(out, p.name)
	}
	return out
}

// choose returns the parts with these names.
func choose(only string) (chosen []part, err error) {
	all := parts()
	for name := range strings.SplitSeq(only, ",") {
		i := slices.Index(names(all), name)
		if i < 0 {
			return nil, fmt.Errorf("-only %q: want any of %s", name, strings.Join(names(all), ", "))
		}
		chosen = append(chosen, all[i])
	}
	return chosen, nil
}

// measureAll measures parts, one after the other. A failed part does not keep the next
// from being measured. The results are nil if it could not start. Samples are written to
// emit as they come.
func measureAll(ctx context.Context, chosen []part, scale scale, log, emit io.Writer) (_ *results, err error) {
	if os.Geteuid() != 0 {
		return nil, errors.New("the benchmark makes network namespaces: run it as root")
	}
	if enclave.Dir() != "" {
		if err := enclave.SetUp(); err != nil {
			return nil, fmt.Errorf("set up the namespaces: %w", err)
		}
	}
	b, err := newBench(scale, log, emit)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, b.close()) }()
	res := &results{machine: thisMachine(ctx, scale)}
	for _, p := range chosen {
		cells, failure := b.measure(ctx, p)
		res.cells = append(res.cells, cells...)
		err = errors.Join(err, failure)
		if ctx.Err() != nil {
			return res, errors.Join(err, ctx.Err())
		}
	}
	res.machine.Seconds, res.machine.LoadAfter = time.Since(b.began).Seconds(), loadAverage()
	return res, err
}

// thisMachine describes the machine; what cannot be found out is left empty.
func thisMachine(ctx context.Context, scale scale) machine {
	m := machine{
		CPUs: runtime.NumCPU(), Go: strings.TrimPrefix(runtime.Version(), "go"),
		Date: time.Now().UTC().Truncate(time.Second), Load: loadAverage(), Scale: scales[scale],
	}
	cpu, _ := os.ReadFile("/proc/cpuinfo")
	if _, model, ok := strings.Cut(string(cpu), "model name"); ok {
		m.CPU, _, _ = strings.Cut(strings.TrimLeft(model, "\t: "), "\n")
	}
	var info unix.Sysinfo_t
	if unix.Sysinfo(&info) == nil {
		m.MemoryMB = int(info.Totalram * uint64(info.Unit) / 1e6)
	}
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		m.Kernel = unix.ByteSliceToString(u.Release[:])
	}
	commit, _ := exec.CommandContext(ctx, "git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+").Output()
	m.Commit = strings.TrimSpace(string(commit))
	return m
}

// loadAverage returns the load averages.
func loadAverage() string {
	b, _ := os.ReadFile("/proc/loadavg")
	f := strings.Fields(string(b))
	return strings.Join(f[:min(3, len(f))], " ")
}
