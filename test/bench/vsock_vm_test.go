// SPDX-License-Identifier: Apache-2.0

//go:build linux && vm && bench

package main

import (
	"context"
	"errors"
	"io"
	"os"
	"slices"
	"testing"
	"time"
)

// The benchmark runs this test in an emulated machine and collects the samples that it
// prints.
func TestMeasureVsock(t *testing.T) {
	b, err := newBench(scale(max(slices.Index(scales, os.Getenv(scaleVariable)), 0)), io.Discard, os.Stderr, os.Stdout)
	if err != nil {
		t.Fatal(err)
	}
	p := vsockPart()
	p.run = func(ctx context.Context, b *bench) {
		b.flows(ctx, true, vsockMeasures(), b.of(2, 1, 1), b.lasting(3*time.Second, 3*time.Second, 500*time.Millisecond), startSplice, startLink)
	}
	_, err = b.measure(t.Context(), p)
	if err = errors.Join(err, b.close()); err != nil {
		t.Error(err)
	}
}
