// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"

	"github.com/fairlead/fairlead/test/bench/report"
)

// Part is one part of the benchmark, and of its report.
//
// To add one: write a file with a function that returns a Part, and name it in
// parts, in the order of the report. Run measures and hands each result to the
// Env: Samples for a distribution, Value for one figure, Fail for what could not
// be measured. It measures its modes interleaved, so that what the machine does
// otherwise hits them alike, with sizes and rounds that Env.Of picks, and it
// returns an error only where nothing further can be measured. Tables are made of
// all cells; figures and the words under them are in the Section. What needs an
// engine measures in an enclave (Env.inEnclave), what needs another kernel in an
// emulated machine (Env.inVM): both hand back cells.
type Part struct {
	report.Section
	Run func(ctx context.Context, e *Env) error
}

// parts are all parts, in the order of the report.
func parts() []Part {
	return []Part{
		latencyPart(),
		missedPart(),
		natPart(),
		emulatedPart(),
		enginePart(),
		kubePart(),
		idlePart(),
		churnPart(),
		startPart(),
		flowsPart(),
		vsockPart(),
		hookPart(),
		scalingPart(),
	}
}
