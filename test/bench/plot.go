// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"slices"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/plotutil"
	"gonum.org/v1/plot/vg"
)

// unitTicks labels ticks with a unit.
type unitTicks struct {
	plot.Ticker
	unit string
}

func (t unitTicks) Ticks(low, high float64) []plot.Tick {
	ticks := t.Ticker.Ticks(low, high)
	for i := range ticks {
		if ticks[i].Label != "" {
			ticks[i].Label = value(ticks[i].Value, t.unit)
		}
	}
	return ticks
}

// draw writes a figure of the cells of one measure: the value against the size, one line
// per mode. The axis is logarithmic if values are far apart.
func draw(path string, cells []cell) error {
	p := plot.New()
	p.Title.Text = cells[0].Measure
	p.Legend.Top = true
	p.Add(plotter.NewGrid())
	var sizes, modes []string
	var values []float64
	points := map[string]plotter.XYs{}
	for _, c := range cells {
		size := number(c.Size)
		if !slices.Contains(sizes, size) {
			sizes = append(sizes, size)
		}
		if !slices.Contains(modes, c.Mode) {
			modes = append(modes, c.Mode)
		}
		points[c.Mode] = append(points[c.Mode], plotter.XY{X: float64(slices.Index(sizes, size)), Y: c.Value})
		values = append(values, c.Value)
	}
	p.NominalX(sizes...)
	p.X.Label.Text = cells[0].SizeUnit
	p.Y.Tick.Marker = unitTicks{plot.DefaultTicks{}, cells[0].Unit}
	if low := slices.Min(values); low > 0 && slices.Max(values) > 20*low {
		p.Y.Scale, p.Y.Tick.Marker = plot.LogScale{}, unitTicks{plot.LogTicks{Prec: -1}, cells[0].Unit}
	}
	var named []any
	for _, mode := range modes {
		named = append(named, mode, points[mode])
	}
	if err := plotutil.AddLinePoints(p, named...); err != nil {
		return err
	}
	return p.Save(18*vg.Centimeter, 9*vg.Centimeter, path)
}
