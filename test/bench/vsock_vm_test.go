// SPDX-License-Identifier: Apache-2.0

//go:build linux && vm && bench

package main

import (
	"errors"
	"os"
	"slices"
	"testing"
)

// The benchmark runs this test in an emulated machine and collects the samples that it
// prints.
func TestMeasureVsock(t *testing.T) {
	b, err := newBench(scale(max(slices.Index(scales, os.Getenv(scaleVariable)), 0)), os.Stderr, os.Stdout)
	if err != nil {
		t.Fatal(err)
	}
	p := vsockPart()
	p.run = vsockFlows
	if err := errors.Join(b.measure(t.Context(), p), b.close()); err != nil {
		t.Error(err)
	}
}
