// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"fmt"
	"os"
	"slices"
	"text/tabwriter"
	"time"
)

// The measures of flows, in the order of the report.
const (
	toGuest    = "TCP to the guest, 1 flow"
	toHost     = "TCP to the host, 1 flow"
	manyFlows  = "TCP to the guest, 64 flows"
	roundTrip  = "TCP round trip of 64 bytes, 1 flow"
	shortConns = "TCP connections of 64 bytes there and back, 1,000 a second"
	udpEcho    = "UDP echo of 64 bytes, 16 clients, each one datagram under way"
)

// flowSample is one measurement of one way.
type flowSample struct {
	value float64 // bytes, round trips, connections or datagrams per second
	p50   time.Duration
	p99   time.Duration
	cpu   time.Duration // of the relays, per megabyte or per thousand of what value counts
	lost  float64       // share of what was asked for
}

// flowMeasures are what is measured, and how.
var flowMeasures = []struct {
	name    string
	unit    string
	measure func(ctx context.Context, w *way, d time.Duration) (flowSample, error)
}{
	{toGuest, "MB", func(ctx context.Context, w *way, d time.Duration) (flowSample, error) {
		return throughput(ctx, w, d, 1, false)
	}},
	{toHost, "MB", func(ctx context.Context, w *way, d time.Duration) (flowSample, error) {
		return throughput(ctx, w, d, 1, true)
	}},
	{manyFlows, "MB", func(ctx context.Context, w *way, d time.Duration) (flowSample, error) {
		return throughput(ctx, w, d, 64, false)
	}},
	{roundTrip, "", roundTrips},
	{shortConns, "k", func(ctx context.Context, w *way, d time.Duration) (flowSample, error) {
		return connections(ctx, w, d, 1000)
	}},
	{udpEcho, "k", echoes},
}

// flows measures what carries bytes: fairlead's own way from a client on the host
// to a server in the guest, and others beside it.
func flows(ctx context.Context, binary, dir string, rounds int, each time.Duration) error {
	r, err := newFlowRig(ctx, binary, dir)
	if err != nil {
		return err
	}
	defer r.close()
	type cell struct{ measure, way string }
	samples := make(map[cell][]flowSample)
	for i := range rounds {
		for _, m := range flowMeasures {
			for _, w := range r.ways {
				if m.name == udpEcho && !w.udp.IsValid() {
					continue
				}
				if err := ctx.Err(); err != nil {
					return err
				}
				fmt.Fprintf(os.Stderr, "\rflows: round %d of %d: %-70s", i+1, rounds, m.name+", "+w.name)
				s, err := m.measure(ctx, w, each)
				if err != nil {
					return fmt.Errorf("%s: %s: %w", m.name, w.name, err)
				}
				samples[cell{m.name, w.name}] = append(samples[cell{m.name, w.name}], s)
			}
		}
	}
	fmt.Fprintln(os.Stderr)
	tw := tabwriter.NewWriter(os.Stdout, 0, 4, 2, ' ', tabwriter.AlignRight)
	for _, m := range flowMeasures {
		_, _ = fmt.Fprintf(tw, "\n%s\n", m.name)
		if m.unit == "MB" {
			_, _ = fmt.Fprintln(tw, "way\tMB/s\t: splice\tCPU ms/MB\t")
		} else {
			_, _ = fmt.Fprintln(tw, "way\tper second\t: splice\tp50\tp99\t+ direct\tCPU ms/1,000\tlost\t")
		}
		base := median(samples[cell{m.name, spliceWay}])
		direct := median(samples[cell{m.name, directWay}])
		for _, w := range r.ways {
			s := median(samples[cell{m.name, w.name}])
			switch {
			case len(samples[cell{m.name, w.name}]) == 0:
				_, _ = fmt.Fprintf(tw, "%s\tdoes not carry it\t\t\t\t\t\t\t\n", w.name)
			case m.unit == "MB":
				_, _ = fmt.Fprintf(tw, "%s\t%.0f\t%.2f\t%.2f\t\n", w.name, s.value/1e6, ratio(s.value, base.value), ms(s.cpu))
			default:
				_, _ = fmt.Fprintf(tw, "%s\t%.0f\t%.2f\t%s\t%s\t%s\t%.0f\t%.2f%%\t\n", w.name, s.value, ratio(s.value, base.value),
					us(usOf(s.p50)), us(usOf(s.p99)), us(usOf(s.p50-direct.p50)), ms(s.cpu), 100*s.lost)
			}
		}
	}
	return tw.Flush()
}

func ms(d time.Duration) float64   { return float64(d) / 1e6 }
func usOf(d time.Duration) float64 { return float64(d) / 1e3 }

func ratio(a, b float64) float64 {
	if b == 0 {
		return 0
	}
	return a / b
}

// median returns the median of each figure.
func median(s []flowSample) flowSample {
	if len(s) == 0 {
		return flowSample{}
	}
	return flowSample{
		value: middle(s, func(v flowSample) float64 { return v.value }),
		p50:   middle(s, func(v flowSample) time.Duration { return v.p50 }),
		p99:   middle(s, func(v flowSample) time.Duration { return v.p99 }),
		cpu:   middle(s, func(v flowSample) time.Duration { return v.cpu }),
		lost:  middle(s, func(v flowSample) float64 { return v.lost }),
	}
}

func middle[T float64 | time.Duration](s []flowSample, of func(flowSample) T) T {
	v := make([]T, len(s))
	for i := range s {
		v[i] = of(s[i])
	}
	slices.Sort(v)
	return v[len(v)/2]
}
