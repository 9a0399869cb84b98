// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"cmp"
	_ "embed"
	"fmt"
	"strings"

	"github.com/goccy/go-yaml"
)

//go:embed targets.yaml
var targetsFile []byte

// target is a figure to reach. A figure is the name of a result and a unit, separated by
// a space.
type target struct {
	What   string
	Figure string
	// The figure may be relative to another one.
	Over, Minus string
	AtMost      float64 `yaml:"at most"`
	AtLeast     float64 `yaml:"at least"`
	Why         string  // it is missed
}

func targets() (all []target, err error) {
	return all, yaml.UnmarshalWithOptions(targetsFile, &all, yaml.Strict())
}

// figure returns a figure, if it was measured.
func (r results) figure(f string) (float64, bool) {
	name, unit, _ := strings.Cut(f, " ")
	if res := r.find(name); res != nil {
		return res.Value(unit)
	}
	return 0, false
}

// judge returns what was measured, and whether that meets the target.
func (t target) judge(r results) (v float64, met, ok bool) {
	v, ok = r.figure(t.Figure)
	other, found := r.figure(t.Over + t.Minus)
	switch {
	case t.Over != "":
		v, ok = v/other, ok && found && other != 0
	case t.Minus != "":
		v, ok = v-other, ok && found
	}
	return v, v >= t.AtLeast && (t.AtMost == 0 || v <= t.AtMost), ok
}

// format writes a figure of the target, which has no unit if it is a ratio.
func (t target) format(v float64) string {
	_, unit, _ := strings.Cut(t.Figure, " ")
	if t.Over != "" {
		unit = "×"
	}
	return value(v, unit)
}

// verdict is the table of targets, and why some were missed, by the numbers in it.
type verdict struct {
	table
	Reasons []string
}

func (r results) verdict(targets []target) verdict {
	v := verdict{table: table{Head: []string{"what", "target", "measured", "met"}}}
	for _, t := range targets {
		limit := "≤ " + t.format(t.AtMost)
		if t.AtMost == 0 {
			limit = "≥ " + t.format(t.AtLeast)
		}
		row := []string{t.What, limit, missing, "not measured"}
		if figure, met, ok := t.judge(r); ok {
			row[2], row[3] = t.format(figure), "yes"
			if !met {
				v.Reasons = append(v.Reasons, cmp.Or(t.Why, "Not known yet."))
				row[3] = fmt.Sprintf("**no** (%d)", len(v.Reasons))
			}
		}
		v.Rows = append(v.Rows, row)
	}
	return v
}
