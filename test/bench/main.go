// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Command bench compares fairlead with its own polling mode, and its link with other
// ways to carry bytes. Both sides are measured in one run, so that other load on the
// machine affects them alike. It writes results in Go's benchmark format, which benchstat
// compares, and a report with tables and figures. It needs root and works in network
// namespaces of its own.
package main

import (
	"context"
	"debug/buildinfo"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/perf/benchfmt"
	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/test/kit/enclave"
	"github.com/fairlead/fairlead/test/kit/program"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	err := program.EnterRoot()
	if err == nil {
		err = run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	}
	if err != nil {
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
	only := fs.String("only", "", "the parts to measure, separated by commas; all if empty")
	file := fs.String("out", os.DevNull, "write the results to this file; - is standard output, without a report")
	dir := fs.String("report", "", "write README.md and figures to this directory instead of tables to standard output")
	runs := fs.Int("runs", 1, "how often to measure everything; the report has the medians of all runs")
	earlier := fs.String("before", "", "show the results in this file, of an earlier version, beside those that targets are compared with")
	render := fs.String("render", "", "measure nothing, and report the results in this file")
	followed := fs.String("budget", "", "measure only how long an event takes for each step on its way through these programs: name=file, separated by commas")
	rounds := fs.Int("rounds", 300, "how many listeners -budget opens with each program")
	relay := fs.String("relay", "", "be a relay of the part flows; for internal use")
	if err := fs.Parse(args); err != nil {
		return err
	}
	if *relay != "" {
		return runRelay(ctx, *relay)
	}
	if *followed != "" {
		return budget(ctx, *followed, *rounds, log, out)
	}
	if *runs < 1 {
		return fmt.Errorf("-runs %d: want at least 1", *runs)
	}
	var before results
	if *earlier != "" {
		var err error
		if before, err = readResults(*earlier); err != nil {
			return err
		}
	}
	if *render != "" {
		res, err := readResults(*render)
		if err != nil {
			return err
		}
		return writeReport(out, *dir, res, before)
	}
	scale := scale(slices.Index(scales, *size))
	if scale < 0 {
		return fmt.Errorf("-scale %q: want one of %s", *size, strings.Join(scales, ", "))
	}
	chosen := parts()
	if isEarlier() { // the emulated machine has the program of this tree
		chosen = slices.DeleteFunc(chosen, func(p part) bool { return p.name == vsockPart().name })
	}
	if *only != "" {
		names := strings.Split(*only, ",")
		chosen = slices.DeleteFunc(chosen, func(p part) bool { return !slices.Contains(names, p.name) })
		if len(chosen) != len(names) {
			return fmt.Errorf("-only %q: there is no such part, or it comes twice", *only)
		}
	}
	if *file == "-" {
		_, err := measureRuns(ctx, *runs, chosen, scale, log, out)
		return err
	}
	f, err := os.Create(*file)
	if err != nil {
		return err
	}
	res, err := measureRuns(ctx, *runs, chosen, scale, log, f)
	return errors.Join(err, f.Close(), writeReport(out, *dir, res, before))
}

// measureRuns measures parts in several runs, one after the other.
func measureRuns(ctx context.Context, runs int, chosen []part, scale scale, log, out io.Writer) (all results, err error) {
	if os.Geteuid() != 0 {
		return nil, errors.New("the benchmark makes network namespaces: run it as root")
	}
	if enclave.Dir() != "" {
		if err := enclave.SetUp(); err != nil {
			return nil, fmt.Errorf("set up the namespaces: %w", err)
		}
	}
	for n := 1; n <= runs && ctx.Err() == nil; n++ {
		config := machine(scale)
		if runs > 1 {
			config = append(config, benchfmt.Config{Key: runKey, Value: []byte(strconv.Itoa(n)), File: true})
		}
		res, failed := measureAll(ctx, chosen, scale, config, log, out)
		all, err = append(all, res...), errors.Join(err, failed)
	}
	return all, err
}

// measureAll measures parts, one after the other, and writes the results of each to out.
// A failed part does not keep the next from being measured.
func measureAll(ctx context.Context, chosen []part, scale scale, config []benchfmt.Config, log, out io.Writer) (_ results, err error) {
	b, err := newBench(scale, config, log, out)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, b.close()) }()
	for _, p := range chosen {
		err = errors.Join(err, b.measure(ctx, p), ctx.Err())
		if ctx.Err() != nil {
			return b.results, err
		}
	}
	b.end()
	return b.results, err
}

// machine describes the machine and the run; what cannot be found out is left empty.
func machine(scale scale) (c []benchfmt.Config) {
	set := func(key, value string) {
		if value != "" {
			c = append(c, benchfmt.Config{Key: key, Value: []byte(value), File: true})
		}
	}
	info, _ := os.ReadFile("/proc/cpuinfo")
	if _, model, ok := strings.Cut(string(info), "model name\t: "); ok {
		model, _, _ = strings.Cut(model, "\n")
		set("cpu", model)
	}
	set("cpus", fmt.Sprint(runtime.NumCPU()))
	info, _ = os.ReadFile("/proc/meminfo")
	total, _, _ := strings.Cut(string(info), "\n")
	set("memory", strings.TrimSpace(strings.TrimPrefix(total, "MemTotal:")))
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		set("kernel", unix.ByteSliceToString(u.Release[:]))
	}
	set("go", strings.TrimPrefix(runtime.Version(), "go"))
	set("commit", commit())
	set("date", time.Now().UTC().Format("2006-01-02 15:04 MST"))
	set("scale", scales[scale])
	set("load", loadAverage())
	return c
}

// isEarlier reports whether a program is measured that this process did not build: an earlier
// version, or that of the process which started this one.
func isEarlier() bool { return os.Getenv(program.Variable) != "" }

// commit returns that of the program that is measured, with a plus sign if it was changed.
func commit() string {
	if !isEarlier() {
		out, _ := exec.Command("git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+").Output()
		return strings.TrimSpace(string(out))
	}
	info, err := buildinfo.ReadFile(os.Getenv(program.Variable))
	if err != nil {
		return ""
	}
	var of string
	for _, s := range info.Settings {
		switch {
		case s.Key == "vcs.revision":
			of = s.Value[:min(12, len(s.Value))] + of
		case s.Key == "vcs.modified" && s.Value == "true":
			of += "+"
		}
	}
	return of
}

// loadAverage returns the load averages over 1, 5 and 15 minutes.
func loadAverage() string {
	b, _ := os.ReadFile("/proc/loadavg")
	f := strings.Fields(string(b))
	return strings.Join(f[:min(3, len(f))], " ")
}
