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

// figure is how a measure is drawn.
type figure struct {
	file string // name of the SVG, without its extension
	kind kind
}

type kind int

const (
	lines kind = iota // the value against the size, one line per mode
	bars              // the value, one bar per mode
	cdf               // the share of samples up to a value, one line per mode
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

// draw writes a figure of the cells of one measure, none of which failed.
func draw(path string, kind kind, cells []cell) error {
	p := plot.New()
	p.Title.Text = cells[0].Measure
	p.Legend.Top = true
	p.Add(plotter.NewGrid())
	var err error
	switch kind {
	case lines:
		err = drawLines(p, cells)
	case bars:
		err = drawBars(p, cells)
	case cdf:
		err = drawCDF(p, cells)
	}
	if err != nil {
		return err
	}
	return p.Save(18*vg.Centimeter, 9*vg.Centimeter, path)
}

// scaleAxis makes an axis logarithmic if its values are far apart.
func scaleAxis(a *plot.Axis, unit string, values []float64) {
	a.Tick.Marker = unitTicks{plot.DefaultTicks{}, unit}
	if low := slices.Min(values); low > 0 && slices.Max(values) > 20*low {
		a.Scale, a.Tick.Marker = plot.LogScale{}, unitTicks{plot.LogTicks{Prec: -1}, unit}
	}
}

func drawLines(p *plot.Plot, cells []cell) error {
	var sizes, values []float64
	points := map[string]plotter.XYs{}
	for _, c := range cells {
		if !slices.Contains(sizes, c.Size) {
			sizes = append(sizes, c.Size)
		}
		x := float64(slices.Index(sizes, c.Size))
		points[c.Mode] = append(points[c.Mode], plotter.XY{X: x, Y: c.Value})
		values = append(values, c.Value)
	}
	var labels []string
	for _, s := range sizes {
		labels = append(labels, number(s))
	}
	p.NominalX(labels...)
	p.X.Label.Text = cells[0].SizeUnit
	scaleAxis(&p.Y, cells[0].Unit, values)
	return plotutil.AddLinePoints(p, byMode(cells, points)...)
}

func drawCDF(p *plot.Plot, cells []cell) error {
	var values []float64
	points := map[string]plotter.XYs{}
	for _, c := range cells {
		if c.Dist == nil {
			continue
		}
		for q, v := range c.Dist.Quantiles {
			points[c.Mode] = append(points[c.Mode], plotter.XY{X: v, Y: float64(q)})
		}
		values = append(values, c.Dist.Quantiles...)
	}
	p.Y.Label.Text = "% of samples"
	scaleAxis(&p.X, cells[0].Unit, values)
	p.Legend.Left = true
	return plotutil.AddLines(p, byMode(cells, points)...)
}

// byMode returns names and points in the order of the cells, for plotutil.
func byMode(cells []cell, points map[string]plotter.XYs) (out []any) {
	for _, c := range cells {
		if xys, ok := points[c.Mode]; ok {
			out = append(out, c.Mode, xys)
			delete(points, c.Mode)
		}
	}
	return out
}

func drawBars(p *plot.Plot, cells []cell) error {
	var labels []string
	var values plotter.Values
	for _, c := range cells {
		labels, values = append(labels, c.Mode), append(values, c.Value)
	}
	b, err := plotter.NewBarChart(values, vg.Centimeter)
	if err != nil {
		return err
	}
	b.Color = plotutil.Color(0)
	p.Add(b)
	p.NominalX(labels...)
	p.Y.Tick.Marker = unitTicks{plot.DefaultTicks{}, cells[0].Unit}
	return nil
}
