// SPDX-License-Identifier: Apache-2.0

//go:build linux && vm

package main

import (
	"errors"
	"os"
	"slices"
	"testing"
)

// The benchmark runs this one in an emulated machine and collects the samples that it
// prints.
func BenchmarkVsock(t *testing.B) {
	t.ReportMetric(0, "ns/op") // not reported
	b, err := newBench(scale(max(slices.Index(scales, os.Getenv(scaleVariable)), 0)), nil, os.Stderr, os.Stdout)
	if err != nil {
		t.Fatal(err)
	}
	p := vsockPart()
	p.run = vsockFlows
	if err := errors.Join(b.measure(t.Context(), p), b.close()); err != nil {
		t.Error(err)
	}
}
