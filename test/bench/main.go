// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Command bench measures fairlead against its own polling mode, all modes in
// one run and side by side, so that what the machine does otherwise hits them
// alike. It needs root and works in network namespaces of its own.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"text/tabwriter"
	"time"
)

func main() {
	rounds := flag.Int("rounds", 30, "rounds of the measures of latency, in each every mode is measured; 0 for none")
	perRound := flag.Int("per-round", 10, "measurements of an event mode in each round")
	rules := flag.Int("nat-rounds", 20, "rounds of NAT rules at each size of the table; 0 leaves them out")
	jsonl := flag.String("json", "", "also write each result as a JSON line to this file")
	flowRounds := flag.Int("flow-rounds", 3, "rounds of the measures of flows; 0 for none")
	flowTime := flag.Duration("flow-time", 2*time.Second, "how long one measure of one way takes")
	idleTime := flag.Duration("idle-time", 20*time.Second, "how long agents that nobody asks are watched; 0 for not")
	relayed := flag.String("relay", "", "be a relay of the measures of flows")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	var err error
	if *relayed != "" {
		err = relay(ctx, *relayed)
	} else {
		err = inOwnDir(ctx, func(binary, dir string) error {
			if *rounds > 0 {
				if err := latency(ctx, binary, dir, *rounds, *perRound, *jsonl); err != nil {
					return err
				}
			}
			if *rules > 0 {
				if err := natRules(ctx, binary, dir, *rules, *jsonl); err != nil {
					return err
				}
			}
			if *flowRounds > 0 {
				if err := flows(ctx, binary, dir, *flowRounds, *flowTime); err != nil {
					return err
				}
			}
			if *idleTime > 0 {
				return idle(ctx, binary, dir, *idleTime)
			}
			return nil
		})
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// mode is one way to observe.
type mode struct {
	name  string
	flags []string
	poll  time.Duration // 0 for events
}

var modes = []mode{
	{"bpf", []string{"--observer", "bpf"}, 0},
	{"poll 1s", []string{"--observer", "poll", "--poll-interval", "1s"}, time.Second},
	{"poll 3s", []string{"--observer", "poll", "--poll-interval", "3s"}, 3 * time.Second},
}

// The measures, in the order of the report.
const (
	openMessage = "listen() returns -> message on the link"
	openHost    = "listen() returns -> host port accepts"
	gone        = "close() returns -> withdrawal on the link"
)

type result struct {
	Measure string  `json:"measure"`
	Mode    string  `json:"mode"`
	Rung    string  `json:"rung"`
	N       int     `json:"n"`
	P50     float64 `json:"p50_us"`
	P90     float64 `json:"p90_us"`
	P99     float64 `json:"p99_us"`
	Max     float64 `json:"max_us"`
}

// inOwnDir runs f with the program and a directory of its own.
func inOwnDir(ctx context.Context, f func(binary, dir string) error) error {
	if os.Geteuid() != 0 {
		return fmt.Errorf("it makes network namespaces, which needs root: run it with sudo")
	}
	dir, err := os.MkdirTemp("", "fairlead-bench-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	binary := os.Getenv("FAIRLEAD_BINARY")
	if binary == "" {
		binary = filepath.Join(dir, "fairlead")
		build := exec.CommandContext(ctx, "go", "build", "-o", binary, "github.com/fairlead/fairlead/cmd/fairlead")
		build.Stderr = os.Stderr
		if err := build.Run(); err != nil {
			return fmt.Errorf("build the program: %w", err)
		}
	}
	return f(binary, dir)
}

func latency(ctx context.Context, binary, dir string, rounds, perRound int, jsonl string) error {
	var probes []*probe
	defer func() {
		for _, p := range probes {
			p.close()
		}
	}()
	for i, m := range modes {
		p, err := newProbe(ctx, binary, filepath.Join(dir, fmt.Sprint(i)), m)
		if err != nil {
			return fmt.Errorf("%s: %w", m.name, err)
		}
		probes = append(probes, p)
	}
	for r := range rounds {
		if err := ctx.Err(); err != nil {
			return err
		}
		fmt.Fprintf(os.Stderr, "\rround %d of %d", r+1, rounds)
		if err := round(ctx, probes, perRound); err != nil {
			return err
		}
	}
	fmt.Fprintln(os.Stderr)
	var results []result
	for _, measure := range []string{openMessage, openHost, gone} {
		for _, p := range probes {
			res, err := p.result(measure)
			if err != nil {
				return err
			}
			results = append(results, res)
		}
	}
	if jsonl != "" {
		if err := writeJSON(jsonl, results); err != nil {
			return err
		}
	}
	return report(results)
}

func natRules(ctx context.Context, binary, dir string, natRounds int, jsonl string) error {
	nat, err := measureNAT(ctx, binary, dir, natRounds)
	if err != nil {
		return fmt.Errorf("NAT: %w", err)
	}
	if jsonl != "" {
		if err := appendNATJSON(jsonl, nat); err != nil {
			return err
		}
	}
	return reportNAT(nat)
}

// round measures all modes at once, each at a moment of its own choice, so that
// pollers are met at any phase. The event mode is measured alone, after that.
func round(ctx context.Context, probes []*probe, perRound int) error {
	var wg sync.WaitGroup
	errs := make([]error, len(probes))
	for i, p := range probes {
		n := 1
		if p.mode.poll == 0 {
			n = perRound
		}
		wg.Go(func() {
			for range n {
				p.pause()
				if errs[i] = p.measure(ctx); errs[i] != nil {
					errs[i] = fmt.Errorf("%s: %w", p.mode.name, errs[i])
					return
				}
			}
		})
	}
	wg.Wait()
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

func (p *probe) result(measure string) (result, error) {
	ds := p.samples[measure]
	if len(ds) == 0 {
		return result{}, fmt.Errorf("%s: no sample of %q", p.mode.name, measure)
	}
	slices.Sort(ds)
	at := func(q float64) float64 {
		return float64(ds[min(len(ds)-1, int(q*float64(len(ds))))].Nanoseconds()) / 1e3
	}
	return result{measure, p.mode.name, p.rung, len(ds), at(0.5), at(0.9), at(0.99), at(1)}, nil
}

func writeJSON(path string, results []result) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	enc := json.NewEncoder(f)
	for _, r := range results {
		if err := enc.Encode(r); err != nil {
			_ = f.Close()
			return err
		}
	}
	return f.Close()
}

func report(results []result) error {
	w := tabwriter.NewWriter(os.Stdout, 0, 4, 2, ' ', tabwriter.AlignRight)
	base := map[string]float64{}
	last := ""
	for _, r := range results {
		if r.Measure != last {
			_, _ = fmt.Fprintf(w, "\n%s\n", r.Measure)
			_, _ = fmt.Fprintln(w, "mode\tn\tp50\tp90\tp99\tmax\tp50 : bpf\t")
			last = r.Measure
		}
		if r.Mode == modes[0].name {
			base[r.Measure] = r.P50
		}
		_, _ = fmt.Fprintf(w, "%s\t%d\t%s\t%s\t%s\t%s\t%.0f\t\n", r.Mode, r.N, us(r.P50), us(r.P90), us(r.P99), us(r.Max), r.P50/base[r.Measure])
	}
	if err := w.Flush(); err != nil {
		return err
	}
	var rungs []string
	for _, r := range results {
		if r.Measure == openMessage {
			rungs = append(rungs, fmt.Sprintf("%s: %s", r.Mode, r.Rung))
		}
	}
	fmt.Printf("\nrungs: %s\n", strings.Join(rungs, "; "))
	return nil
}

func us(v float64) string {
	if v >= 10_000 {
		return fmt.Sprintf("%.0f ms", v/1e3)
	}
	return fmt.Sprintf("%.0f µs", v)
}
