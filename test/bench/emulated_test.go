// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"bytes"
	"io"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/fairlead/fairlead/test/bench/report"
)

// Cells come through what breaks long lines, and sets its own before each.
func TestCellsOfAnEmulatedMachineAreCollected(t *testing.T) {
	var out bytes.Buffer
	want := []report.Cell{
		{Part: "p", Measure: "close() → withdrawal", Mode: "bpf", Unit: "s", Value: 2, Dist: report.Summarize([]float64{1.0 / 3, 2, 3})},
		{Part: "p", Measure: "close() → withdrawal", Mode: "poll", Unit: "s", Failed: "no samples"},
	}
	sink := report.NewSink(pieces{&out})
	for _, c := range want {
		if err := sink.Cell(c); err != nil {
			t.Fatal(err)
		}
	}
	var told strings.Builder
	told.WriteString("[6.12] === RUN TestX\r\n")
	for line := range strings.Lines(out.String()) {
		if len(line) > 1000 {
			t.Errorf("a line has %d bytes", len(line))
		}
		told.WriteString("[6.12] " + strings.TrimSpace(line) + "\r\n[6.12] console: something\n\n")
	}
	var got []report.Cell
	e := &Env{Log: io.Discard, part: "p", put: func(c report.Cell) error { got = append(got, c); return nil }}
	n, said, err := e.collect(strings.NewReader(told.String() + "[6.12] PASS"))
	if err != nil || n != len(want) || said != "[6.12] === RUN TestX\r\n[6.12] PASS" {
		t.Errorf("%d cells, %q, error %v", n, said, err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	for _, bad := range []string{pieceMark + "zz\n" + pieceMark + ".\n", pieceMark + "7b\n" + pieceMark + ".\n"} {
		if _, _, err := e.collect(strings.NewReader(bad)); err == nil {
			t.Errorf("%q is taken", bad)
		}
	}
}
