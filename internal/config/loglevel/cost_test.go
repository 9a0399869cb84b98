// SPDX-License-Identifier: Apache-2.0

package loglevel

import (
	"io"
	"log/slog"
	"testing"
	"time"
)

// A line that is not written costs no allocation, whichever component has a level of its own.
func TestCostOfALineThatIsNotWritten(t *testing.T) {
	v := New(slog.LevelInfo)
	defer v.Stop()
	log := slog.New(v.Handler(slog.DiscardHandler)).With("source", "docker")
	lines := func() float64 {
		return testing.AllocsPerRun(100, func() { log.Debug("a line", "sink", "hostlink", "err", io.EOF) })
	}
	if n := lines(); n != 0 {
		t.Errorf("%v allocations where no component has a level", n)
	}
	if err := v.Set(Request{"debug", []string{"nat"}, time.Hour}, slog.New(slog.DiscardHandler)); err != nil {
		t.Fatal(err)
	}
	if n := lines(); n != 0 {
		t.Errorf("%v allocations where another component has one", n)
	}
}
