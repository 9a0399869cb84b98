// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"slices"
	"time"

	"github.com/fairlead/fairlead/test/bench/report"
)

// The measures of flows, in the order of the report.
const (
	toGuest    = "TCP to the guest, 1 flow"
	toHost     = "TCP to the host, 1 flow"
	manyFlows  = "TCP to the guest, 64 flows"
	roundTrip  = "TCP round trip of 64 bytes, 1 flow, median"
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

// flowMeasure is what is measured, and how.
type flowMeasure struct {
	name    string
	unit    string // "MB", "time" for its median, or empty for what value counts
	udp     bool
	measure func(ctx context.Context, w *way, d time.Duration) (flowSample, error)
}

// flowMeasures are the six, by these names, with so many connections a second.
func flowMeasures(toGuest, toHost, manyFlows, roundTrip, shortConns, udpEcho string, rate int) []flowMeasure {
	bytes := func(flows int, back bool) func(context.Context, *way, time.Duration) (flowSample, error) {
		return func(ctx context.Context, w *way, d time.Duration) (flowSample, error) {
			return throughput(ctx, w, d, flows, back)
		}
	}
	return []flowMeasure{
		{name: toGuest, unit: "MB", measure: bytes(1, false)},
		{name: toHost, unit: "MB", measure: bytes(1, true)},
		{name: manyFlows, unit: "MB", measure: bytes(64, false)},
		{name: roundTrip, unit: "time", measure: roundTrips},
		{name: shortConns, measure: func(ctx context.Context, w *way, d time.Duration) (flowSample, error) {
			return connections(ctx, w, d, rate)
		}},
		{name: udpEcho, udp: true, measure: echoes},
	}
}

func flowsPart() Part {
	return Part{
		Section: report.Section{
			Name: "flows", Title: "What the link costs a flow", Base: spliceWay,
			About: `A client on the host and a server in the guest, in turns over each way between them:
directly (both in one namespace), through two relays with splice(2) and a unix socket between, through
fairlead's host peer and agent with the link over a unix socket, through a pair of socat, and through gvproxy with its
network stack in user space. All figures are medians of rounds; all are compared with the splice.
There is no polling here: how a port was found does not matter to its bytes.`,
			Figures: []report.Figure{
				{File: "flows-tcp", Title: "TCP to the guest, 1 flow", Measure: toGuest, Kind: report.Bars, Y: "throughput"},
				{File: "flows-roundtrip", Title: "Round trip of 64 bytes", Measure: roundTrip, Kind: report.Bars, Y: "time"},
			},
		},
		Run: flows,
	}
}

// flows measures what carries bytes: fairlead's own way from a client on the host
// to a server in the guest, and others beside it.
func flows(ctx context.Context, e *Env) error {
	dir, err := e.Dir()
	if err != nil {
		return err
	}
	r, err := newFlowRig(ctx, e.Program, dir, false, (*flowRig).splice, (*flowRig).link, (*flowRig).socat, (*flowRig).gvproxy)
	if err != nil {
		return err
	}
	defer r.close()
	d := e.For(time.Second, 500*time.Millisecond, 200*time.Millisecond)
	return measureFlows(ctx, e, r, flowMeasures(toGuest, toHost, manyFlows, roundTrip, shortConns, udpEcho, 1000), e.Of(3, 2, 1), d)
}

// measureFlows measures each for about d on each way, in turns, and records the
// medians of all rounds.
func measureFlows(ctx context.Context, e *Env, r *flowRig, measures []flowMeasure, rounds int, d time.Duration) error {
	type cell struct{ measure, way string }
	samples, errs := make(map[cell][]flowSample), make(map[cell]error)
	for i := range rounds {
		e.Progress("round %d", i+1)
		for _, m := range measures {
			for _, w := range r.ways {
				k := cell{m.name, w.name}
				if m.udp && !w.udp.IsValid() || errs[k] != nil {
					continue
				}
				s, err := m.measure(ctx, w, d)
				if ctx.Err() != nil {
					return ctx.Err()
				}
				errs[k] = err
				samples[k] = append(samples[k], s)
			}
		}
	}
	for _, m := range measures {
		for _, w := range r.ways {
			k := cell{m.name, w.name}
			if len(samples[k]) > 0 {
				m.record(e, w.name, median(samples[k]), errs[k])
			}
		}
	}
	return nil
}

// record makes the cell of a measure: its time where that is what matters, else
// its rate, and what else was measured of it.
func (m flowMeasure) record(e *Env, way string, s flowSample, err error) {
	c := report.Cell{Measure: m.name, Mode: way, Unit: "per second", Extra: map[string]float64{}}
	if err != nil {
		c.Extra = nil
		e.Fail(c, err)
		return
	}
	v := s.value
	switch {
	case m.unit == "MB":
		c.Unit = "B/s"
		if way != directWay {
			c.Extra["CPU ms for each MB"] = ms(s.cpu)
		}
		e.Value(c, v)
		return
	case m.unit == "time":
		c.Unit, v = "s", s.p50.Seconds()
	default:
		c.Extra["p50 µs"], c.Extra["lost %"] = usOf(s.p50), 100*s.lost
	}
	c.Extra["p99 µs"] = usOf(s.p99)
	if way != directWay {
		c.Extra["CPU µs for each"] = ms(s.cpu)
	}
	e.Value(c, v)
}

func ms(d time.Duration) float64   { return float64(d) / 1e6 }
func usOf(d time.Duration) float64 { return float64(d) / 1e3 }

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
