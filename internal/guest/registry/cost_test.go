// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"fmt"
	"log/slog"
	"testing"

	"github.com/fairlead/fairlead/internal/port"
)

// counting counts what it is asked to decide.
type counting struct{ asked int }

func (c *counting) Decide(port.Publication) port.Ruling {
	c.asked++
	return port.Ruling{Decision: port.Decision{Allow: true}}
}

// A change looks at what it names, not at what the table holds.
func TestChangeCostIsIndependentOfTableSize(t *testing.T) {
	cost := func(n int) (allocs float64, asked int) {
		rules := new(counting)
		r := New(Options{Rules: rules, Logger: slog.New(slog.DiscardHandler)})
		f := r.Feed("socket")
		set := make([]port.Binding, n)
		for i := range set {
			set[i] = binding(fmt.Sprint(i), fmt.Sprintf("10.%d.%d.1:%d", i>>8&255, i&255, 1+i%60000), 1)
		}
		f.Replace(set)
		x := binding("x", "0.0.0.0:65000", 1)
		up, down := port.Change{Put: []port.Binding{x}}, port.Change{Drop: []port.Origin{{ID: "x"}}}
		const rounds = 100
		rules.asked = 0
		allocs = testing.AllocsPerRun(rounds, func() {
			f.Apply(up)
			_ = r.Publications().View()
			f.Apply(down)
			_ = r.Publications().View()
		})
		return allocs, rules.asked / (rounds + 1)
	}
	few, asked := cost(10)
	many, askedMany := cost(10_000)
	if asked != 1 || askedMany != 1 {
		t.Errorf("rules were asked %d times in a table of 10, %d times in one of 10,000; want once", asked, askedMany)
	}
	if few > mostAllocs || many > few+treeAllocs {
		t.Errorf("a publication that comes and goes allocates %v times in a table of 10, %v in one of 10,000; want at most %d and %d more", few, many, mostAllocs, treeAllocs)
	}
}

const (
	mostAllocs = 22
	treeAllocs = 20 // copies of the nodes on one path, each time
)

func TestTouchedSlotsMergeOnceInOrder(t *testing.T) {
	for _, n := range []int{1, fewSlots, fewSlots + 1, 10 * fewSlots} {
		dirty := new(touched)
		for round := range 3 {
			for i := range n {
				dirty.mark(port.Slot{Protocol: port.TCP, Port: uint16(n - i)}, int64(i*(2-round)))
			}
		}
		if len(dirty.slots) != n {
			t.Fatalf("%d slots of %d", len(dirty.slots), n)
		}
		for i, s := range dirty.slots {
			if want := (touchedSlot{port.Slot{Protocol: port.TCP, Port: uint16(n - i)}, int64(2 * i)}); s != want {
				t.Errorf("of %d slots, number %d = %v, want %v", n, i, s, want)
			}
		}
	}
}
