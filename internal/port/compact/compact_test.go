// SPDX-License-Identifier: Apache-2.0

package compact

import (
	"maps"
	"testing"
)

func TestPeak(t *testing.T) {
	var p Peak
	for _, step := range []struct {
		n    int
		want bool
	}{{10, false}, {0, false}, {many, false}, {many / 2, false}, {many / mostGone, true}, {0, false}, {10 * many, false}, {0, true}} {
		if got := p.Passed(step.n); got != step.want {
			t.Errorf("Passed(%d) = %v, want %v", step.n, got, step.want)
		}
	}
}

func TestMapAndClear(t *testing.T) {
	m := map[int]string{1: "a", 2: "b"}
	if got := Map(m); !maps.Equal(got, m) {
		t.Errorf("Map = %v, want %v", got, m)
	}
	if got := Clear(m); len(got) != 0 || len(m) != 0 {
		t.Errorf("Clear = %v of %v, want the same map, empty", got, m)
	}
}
