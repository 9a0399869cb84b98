// SPDX-License-Identifier: Apache-2.0

package link

import "testing"

// A session's streams together hold a bounded amount, and give it back.
func TestWindowBudget(t *testing.T) {
	var w budget
	const step = 1 << 20
	spans := make([]*windowSpan, 0, growthBudget/step)
	for range growthBudget / step {
		m, err := w.span()
		if err != nil {
			t.Fatal(err)
		}
		s := m.(*windowSpan)
		if err := s.ReserveMemory(256<<10, 255); err != nil {
			t.Fatalf("a stream is refused: %v", err)
		}
		if err := s.ReserveMemory(step, growthPriority); err != nil {
			t.Fatal(err)
		}
		spans = append(spans, s)
	}
	if err := spans[0].ReserveMemory(1, growthPriority); err == nil {
		t.Error("a window grows beyond the budget")
	}
	if err := spans[0].ReserveMemory(256<<10, 255); err != nil {
		t.Errorf("a stream is refused: %v", err)
	}
	spans[1].Done()
	spans[1].Done()
	if err := spans[0].ReserveMemory(step, growthPriority); err != nil {
		t.Errorf("what one stream gave back another cannot have: %v", err)
	}
	spans[0].ReleaseMemory(step)
	for _, s := range spans {
		s.Done()
	}
	if n := w.grown.Load(); n != 0 {
		t.Errorf("%d bytes are not given back", n)
	}
}
