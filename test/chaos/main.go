// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Chaos runs a real agent and a real host peer in network namespaces, with the engines
// that are installed, changes sockets, NAT rules, containers and Services at random, and
// breaks processes, engines, limits and the link. After each fault it reads from the
// kernel and the engines what the guest serves, and from the kernel what the host listens
// at, and counts every difference that stays. Every flow carries its length and a
// checksum: one that is cut must end by an error, never like a complete one.
//
//	go -C test run ./chaos [-seed 1,2] [-minutes 3] [-kernel 6.1] [-report docs/reliability.md]
//
// It needs root. Everything that it starts is in namespaces that end with it.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/fairlead/fairlead/test/kit/enclave"
	"github.com/fairlead/fairlead/test/kit/program"
)

// Environment of TestChaos, which runs in an emulated machine.
const (
	seedVariable    = "FAIRLEAD_CHAOS_SEED"
	minutesVariable = "FAIRLEAD_CHAOS_MINUTES"
)

// resultMark begins the line with the result of TestChaos.
const resultMark = "chaos result: "

type options struct {
	seeds   string
	minutes float64
	kernel  string
	engines string
	results string
	report  string
	inside  string // file for the result: this process runs in an enclave
}

func main() {
	var o options
	flag.StringVar(&o.seeds, "seed", "1", "`seeds` of the random operations, one run for each")
	flag.Float64Var(&o.minutes, "minutes", 3, "length of each run")
	flag.StringVar(&o.kernel, "kernel", "", "`version` of the kernel of an emulated machine to run in, without engines")
	flag.StringVar(&o.engines, "engines", "docker,containerd,kube", "engines to run, as far as they are installed")
	flag.StringVar(&o.results, "results", "", "`directory` with the results of other runs, for the report; this one's is added")
	flag.StringVar(&o.report, "report", "", "document to write the results into, between its markers")
	flag.StringVar(&o.inside, "inside", "", "for its own use")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := o.run(ctx)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "chaos:", err)
		os.Exit(1)
	}
}

func (o options) run(ctx context.Context) (err error) {
	if o.inside != "" {
		return o.runInside(ctx)
	}
	if err := program.EnterRoot(); err != nil {
		return err
	}
	tmp, err := os.MkdirTemp("", "fairlead-chaos-")
	if err != nil {
		return err
	}
	defer func() {
		if err == nil || ctx.Err() != nil { // else the logs remain
			_ = os.RemoveAll(tmp)
		}
	}()
	if o.results == "" {
		o.results = tmp
	}
	if err := os.MkdirAll(o.results, 0o755); err != nil {
		return err
	}
	for seed := range strings.SplitSeq(o.seeds, ",") {
		if err := o.runSeed(ctx, tmp, seed); err != nil {
			return fmt.Errorf("seed %s: %w", seed, err)
		}
	}
	return o.conclude()
}

// runSeed makes one run in namespaces or in a machine, and keeps its result.
func (o options) runSeed(ctx context.Context, tmp, seed string) error {
	if _, err := strconv.ParseUint(seed, 10, 64); err != nil {
		return err
	}
	run := o.runHere
	if o.kernel != "" {
		run = o.runMachine
	}
	b, err := run(ctx, tmp, seed)
	if err != nil {
		return err
	}
	var r result
	if err := json.Unmarshal(b, &r); err != nil {
		return err
	}
	fmt.Println(r)
	return os.WriteFile(filepath.Join(o.results, fmt.Sprintf("%s-%s.json", r.Kernel, seed)), b, 0o644)
}

// runHere runs this program in an enclave, which ends with ctx.
func (o options) runHere(ctx context.Context, tmp, seed string) ([]byte, error) {
	binary, err := program.Path(tmp)
	if err != nil {
		return nil, err
	}
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	out := filepath.Join(tmp, "result")
	cmd := exec.CommandContext(ctx, self, "-inside", out, "-seed", seed, "-minutes", fmt.Sprint(o.minutes), "-engines", o.engines)
	cmd.Env = append(os.Environ(), program.Variable+"="+binary, "TMPDIR="+tmp)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	if err := enclave.Run(cmd); err != nil {
		return nil, errors.Join(ctx.Err(), err)
	}
	return os.ReadFile(out)
}

// runInside is the process in the enclave.
func (o options) runInside(ctx context.Context) error {
	if err := enclave.SetUp(); err != nil {
		return err
	}
	seed, err := strconv.ParseUint(o.seeds, 10, 64)
	if err != nil {
		return err
	}
	r, err := runChaos(ctx, seed, o.minutes, strings.Split(o.engines, ","), false)
	if err != nil {
		return err
	}
	b, err := json.Marshal(r)
	if err != nil {
		return err
	}
	return os.WriteFile(o.inside, b, 0o644)
}

// runMachine runs TestChaos in an emulated machine.
func (o options) runMachine(ctx context.Context, _, seed string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, "go", "-C", "test", "run", "./vm", "-json", "-kernel", o.kernel, "-run", "^TestChaos$",
		"-env", seedVariable+"="+seed, "-env", fmt.Sprint(minutesVariable, "=", o.minutes), "./test/chaos")
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.Stderr = os.Stderr
	b, err := cmd.Output()
	text := outputOf(b)
	if err != nil {
		return nil, fmt.Errorf("%w\n%s", err, text)
	}
	_, rest, ok := strings.Cut(text, resultMark)
	line, _, _ := strings.Cut(rest, "\n")
	if !ok {
		return nil, fmt.Errorf("the machine gave no result:\n%s", text)
	}
	return []byte(line), nil
}

// outputOf joins the output in events of go test -json.
func outputOf(events []byte) string {
	var b strings.Builder
	for line := range bytes.Lines(events) {
		var e struct{ Output string }
		if json.Unmarshal(line, &e) == nil {
			b.WriteString(e.Output)
		}
	}
	return b.String()
}

// conclude writes the report of all results, and returns an error if there is a difference.
func (o options) conclude() error {
	files, err := filepath.Glob(filepath.Join(o.results, "*.json"))
	if err != nil {
		return err
	}
	slices.Sort(files)
	var all []result
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			return err
		}
		var r result
		if err := json.Unmarshal(b, &r); err != nil {
			return fmt.Errorf("%s: %w", f, err)
		}
		all = append(all, r)
	}
	text := report(all)
	fmt.Print(text)
	if o.report != "" {
		if err := writeReport(o.report, text); err != nil {
			return err
		}
	}
	if slices.ContainsFunc(all, result.failed) {
		return errors.New("there were differences or wrong flows")
	}
	return nil
}
