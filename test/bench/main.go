// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Command bench measures fairlead against its own polling mode, and what carries
// its bytes against other ways, all side by side in one run, so that what the
// machine does otherwise hits them alike. It writes what it measured as JSON
// lines, and a document with tables and figures. It needs root and works in
// network namespaces of its own.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/fairlead/fairlead/test/bench/report"
	"github.com/fairlead/fairlead/test/kit/enclave"
	"github.com/fairlead/fairlead/test/kit/program"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	if errors.Is(err, flag.ErrHelp) {
		os.Exit(2)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// run is the program: out gets the document where no directory is named, log the
// progress.
func run(ctx context.Context, args []string, out, log io.Writer) error {
	fs := flag.NewFlagSet("bench", flag.ContinueOnError)
	fs.SetOutput(log)
	quick := fs.Bool("quick", false, "measure for a few minutes in all")
	tiny := fs.Bool("tiny", false, "measure for seconds: shows that it works, and figures that mean nothing")
	only := fs.String("only", "", "the parts to measure, by comma: "+strings.Join(names(parts()), ","))
	jsonl := fs.String("json", "", "write the results as JSON lines to this file")
	dir := fs.String("report", "", "write README.md and figures to this directory; without one the text goes to standard output")
	render := fs.String("render", "", "measure nothing: make the report of this file of JSON lines")
	held := fs.Int("hold", 0, "be a process with so many listeners, for the part idle")
	relayed := fs.String("relay", "", "be a relay of the part flows")
	if err := fs.Parse(args); err != nil {
		return err
	}
	if fs.NArg() > 0 {
		return fmt.Errorf("argument %q: want flags only", fs.Arg(0))
	}
	if *relayed != "" {
		return relay(ctx, *relayed)
	}
	if *held > 0 {
		return hold(ctx, *held)
	}
	chosen, err := choose(parts(), *only)
	if err != nil {
		return err
	}
	scale := Full
	switch {
	case *tiny:
		scale = Tiny
	case *quick:
		scale = Quick
	}
	var res *report.Results
	if *render != "" {
		f, err := os.Open(*render)
		if err != nil {
			return err
		}
		defer func() { _ = f.Close() }()
		if res, err = report.Read(f); err != nil {
			return fmt.Errorf("%s: %w", *render, err)
		}
	} else {
		var failure error
		res, failure = measure(ctx, chosen, scale, *jsonl, log)
		if res == nil {
			return failure
		}
		err = failure
	}
	for _, c := range res.Failed() {
		err = errors.Join(err, fmt.Errorf("%s: %s", c, c.Failed))
	}
	if len(res.Cells) == 0 {
		return errors.Join(err, errors.New("nothing was measured"))
	}
	if *dir == "" {
		return errors.Join(err, report.Write(out, res, document()))
	}
	return errors.Join(err, report.WriteDir(*dir, res, document()))
}

func names(ps []Part) (out []string) {
	for _, p := range ps {
		out = append(out, p.Name)
	}
	return out
}

func choose(all []Part, only string) ([]Part, error) {
	if only == "" {
		return all, nil
	}
	var chosen []Part
	for name := range strings.SplitSeq(only, ",") {
		i := slices.IndexFunc(all, func(p Part) bool { return p.Name == name })
		if i < 0 {
			return nil, fmt.Errorf("-only %q: want any of %s", name, strings.Join(names(all), ", "))
		}
		chosen = append(chosen, all[i])
	}
	return chosen, nil
}

// measure runs parts, one after the other. The results are nil where it could not
// begin. An error of one part does not keep it from the next.
func measure(ctx context.Context, chosen []Part, scale Scale, jsonl string, log io.Writer) (_ *report.Results, err error) {
	if os.Geteuid() != 0 {
		return nil, errors.New("it makes network namespaces, which needs root: run it with sudo")
	}
	if enclave.Dir() != "" {
		if err := enclave.SetUp(); err != nil {
			return nil, fmt.Errorf("set up the namespaces: %w", err)
		}
	}
	dir, err := os.MkdirTemp("", "flbench-")
	if err != nil {
		return nil, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	e := &Env{Scale: scale, Log: log, dir: dir, begun: time.Now()}
	if e.Program, err = program.Path(dir); err != nil {
		return nil, err
	}
	file := io.Discard
	if jsonl != "" {
		f, err := os.Create(filepath.Clean(jsonl))
		if err != nil {
			return nil, err
		}
		defer func() { _ = f.Close() }()
		file = f
	}
	sink, res := report.NewSink(file), &report.Results{Machine: thisMachine(ctx, scale)}
	if err := sink.Machine(res.Machine); err != nil {
		return nil, err
	}
	e.put = func(c report.Cell) error {
		res.Cells = append(res.Cells, c)
		return sink.Cell(c)
	}
	for _, p := range chosen {
		e.part = p.Name
		before := len(res.Cells)
		began := time.Now()
		failure := p.Run(ctx, e)
		e.Progress("took %.0f s", time.Since(began).Seconds())
		if failure == nil && len(res.Cells) == before {
			failure = errors.New("it measured nothing")
		}
		if failure != nil {
			err = errors.Join(err, fmt.Errorf("%s: %w", p.Name, failure))
			// The report says so too, in short.
			brief, _, _ := strings.Cut(failure.Error(), "\n")
			e.Fail(report.Cell{Measure: "the part as a whole", Mode: modeBPF}, errors.New(brief))
		}
		if ctx.Err() != nil {
			return res, errors.Join(err, ctx.Err(), e.err)
		}
	}
	res.Machine.Seconds, res.Machine.LoadAfter = time.Since(e.begun).Seconds(), load()
	return res, errors.Join(err, sink.Machine(res.Machine), e.err)
}
