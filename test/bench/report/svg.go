// SPDX-License-Identifier: Apache-2.0

package report

import (
	"fmt"
	"html"
	"math"
	"slices"
	"strings"
)

// Measures of a figure, in pixels.
const (
	figWidth, figHeight     = 720, 360
	padLeft, padRight       = 84, 32
	padTop, padBottom       = 62, 56
	plotWidth, plotHeight   = figWidth - padLeft - padRight, figHeight - padTop - padBottom
	legendStep, legendIndex = 16, 44 // from one name to the next, beside the name itself; from the top
)

// colours differ in lightness too, for who sees few colours and for paper.
var colours = []string{"#0b6e4f", "#e07a1f", "#a3245c", "#3a5fcd", "#777777", "#b8a000"}

// axis maps values to pixels.
type axis struct {
	low, high float64
	log       bool
	from, to  float64 // pixels
	unit      string
}

func (a axis) at(v float64) float64 {
	low, high := a.low, a.high
	if a.log {
		v, low, high = math.Log10(max(v, a.low)), math.Log10(low), math.Log10(high)
	}
	return a.from + (a.to-a.from)*(v-low)/(high-low)
}

// newAxis spans the values, up to a round number.
func newAxis(values []float64, log bool, from, to float64, unit string) axis {
	a := axis{log: log, from: from, to: to, unit: unit}
	if log {
		values = slices.DeleteFunc(slices.Clone(values), func(v float64) bool { return v <= 0 })
	}
	if len(values) == 0 {
		values = []float64{1}
	}
	low, high := slices.Min(values), slices.Max(values)
	if log {
		a.low = math.Pow(10, math.Floor(math.Log10(low)+1e-9))
		a.high = math.Pow(10, math.Ceil(math.Log10(high)-1e-9))
		if a.high <= a.low {
			a.high = a.low * 10
		}
		return a
	}
	step := niceStep(high)
	a.high = max(step, step*math.Ceil(high/step-1e-9))
	return a
}

// niceStep is a round distance between ticks that makes four or five of them.
func niceStep(high float64) float64 {
	if high <= 0 {
		return 1
	}
	p := math.Pow(10, math.Floor(math.Log10(high)))
	for _, s := range []float64{0.2, 0.25, 0.5, 1, 2} {
		if high/(s*p) <= 5 {
			return s * p
		}
	}
	return p
}

func (a axis) ticks() (out []float64) {
	if a.log {
		decades := math.Round(math.Log10(a.high / a.low))
		every := math.Ceil(decades / 8)
		for d := 0.0; d <= decades; d += every {
			out = append(out, a.low*math.Pow(10, d))
		}
		return out
	}
	step := niceStep(a.high)
	for v := 0.0; v <= a.high+step/1e6; v += step {
		out = append(out, v)
	}
	return out
}

// label writes a tick.
func (a axis) label(v float64) string {
	if a.unit == "" || scales[a.unit] == nil {
		return Number(short(v))
	}
	return Value(v, a.unit)
}

// draw returns a figure of cells of one measure, or nothing where none has a value.
func draw(f Figure, cells []Cell) string {
	cells = slices.DeleteFunc(slices.Clone(cells), func(c Cell) bool {
		return c.Measure != f.Measure || !c.OK() || f.Kind == Distribution && c.Dist == nil
	})
	if len(cells) == 0 {
		return ""
	}
	modes := uniq(cells, func(c Cell) string { return c.Mode })
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%d" height="%d" font-family="system-ui, sans-serif" font-size="12" fill="#222">`+"\n",
		figWidth, figHeight, figWidth, figHeight)
	fmt.Fprintf(&b, `<title>%s</title>`+"\n", html.EscapeString(f.Title))
	fmt.Fprintf(&b, `<rect width="%d" height="%d" fill="#fff"/>`+"\n", figWidth, figHeight)
	text(&b, padLeft, 24, "start", 15, f.Title)
	if f.Kind != Bars || len(uniq(cells, func(c Cell) float64 { return c.Size })) > 1 {
		legend(&b, modes)
	}
	switch f.Kind {
	case Lines:
		lines(&b, f, cells, modes)
	case Distribution:
		distribution(&b, f, cells, modes)
	case Bars:
		bars(&b, f, cells, modes)
	}
	b.WriteString("</svg>\n")
	return b.String()
}

func text(b *strings.Builder, x, y float64, anchor string, size int, s string) {
	fmt.Fprintf(b, `<text x="%.1f" y="%.1f" text-anchor="%s" font-size="%d">%s</text>`+"\n", x, y, anchor, size, html.EscapeString(s))
}

func line2(b *strings.Builder, x1, y1, x2, y2 float64, colour string) {
	fmt.Fprintf(b, `<line x1="%.1f" y1="%.1f" x2="%.1f" y2="%.1f" stroke="%s"/>`+"\n", x1, y1, x2, y2, colour)
}

func legend(b *strings.Builder, modes []string) {
	x := float64(padLeft)
	for i, m := range modes {
		fmt.Fprintf(b, `<rect x="%.1f" y="%d" width="10" height="10" fill="%s"/>`+"\n", x, legendIndex-9, colours[i%len(colours)])
		text(b, x+14, legendIndex, "start", 12, m)
		x += 14 + 7*float64(len([]rune(m))) + legendStep
	}
}

// grid draws the horizontal lines, the labels of y, and the names of both axes.
func grid(b *strings.Builder, y axis, nameX, nameY string) {
	for _, v := range y.ticks() {
		line2(b, padLeft, y.at(v), padLeft+plotWidth, y.at(v), "#ddd")
		text(b, padLeft-8, y.at(v)+4, "end", 12, y.label(v))
	}
	text(b, padLeft+plotWidth/2, figHeight-12, "middle", 12, nameX)
	fmt.Fprintf(b, `<text transform="translate(16 %d) rotate(-90)" text-anchor="middle">%s</text>`+"\n", padTop+plotHeight/2, html.EscapeString(nameY))
}

func gridX(b *strings.Builder, x axis) {
	for _, v := range x.ticks() {
		line2(b, x.at(v), padTop, x.at(v), padTop+plotHeight, "#eee")
		text(b, x.at(v), padTop+plotHeight+18, "middle", 12, x.label(v))
	}
}

func path(b *strings.Builder, colour string, points []string) {
	fmt.Fprintf(b, `<polyline fill="none" stroke="%s" stroke-width="2" points="%s"/>`+"\n", colour, strings.Join(points, " "))
}

func axisY(values []float64, f Figure, unit string) axis {
	return newAxis(values, f.LogY, padTop+plotHeight, padTop, unit)
}

func lines(b *strings.Builder, f Figure, cells []Cell, modes []string) {
	var xs, ys []float64
	for _, c := range cells {
		xs, ys = append(xs, c.Size), append(ys, c.Value)
	}
	if cells[0].Unit == "%" {
		ys = append(ys, 100)
	}
	x, y := newAxis(xs, f.LogX, padLeft, padLeft+plotWidth, ""), axisY(ys, f, cells[0].Unit)
	grid(b, y, f.X, f.Y)
	gridX(b, x)
	for i, m := range modes {
		var points []string
		for _, c := range cells {
			if c.Mode != m {
				continue
			}
			points = append(points, fmt.Sprintf("%.1f,%.1f", x.at(c.Size), y.at(c.Value)))
			fmt.Fprintf(b, `<circle cx="%.1f" cy="%.1f" r="3.5" fill="%s"><title>%s</title></circle>`+"\n",
				x.at(c.Size), y.at(c.Value), colours[i%len(colours)], html.EscapeString(m+": "+Value(c.Value, c.Unit)))
		}
		path(b, colours[i%len(colours)], points)
	}
}

func distribution(b *strings.Builder, f Figure, cells []Cell, modes []string) {
	var xs []float64
	for _, c := range cells {
		xs = append(xs, c.Dist.Quantiles...)
	}
	x, y := newAxis(xs, f.LogX, padLeft, padLeft+plotWidth, cells[0].Unit), axisY([]float64{100}, f, "%")
	grid(b, y, f.X, f.Y+", %")
	gridX(b, x)
	for _, c := range cells {
		var points []string
		for q, v := range c.Dist.Quantiles {
			points = append(points, fmt.Sprintf("%.1f,%.1f", x.at(v), y.at(float64(q))))
		}
		path(b, colours[slices.Index(modes, c.Mode)%len(colours)], points)
	}
}

// bars draws a group of bars for each size, or one group with a name below each
// bar where nothing was varied.
func bars(b *strings.Builder, f Figure, cells []Cell, modes []string) {
	var ys []float64
	for _, c := range cells {
		ys = append(ys, c.Value)
	}
	y := axisY(ys, f, cells[0].Unit)
	grid(b, y, f.X, f.Y)
	sizes := uniq(cells, func(c Cell) float64 { return c.Size })
	group := float64(plotWidth) / float64(len(sizes))
	width := min(70, 0.8*group/float64(len(modes)))
	for g, size := range sizes {
		middle := padLeft + group*(float64(g)+0.5)
		if len(sizes) > 1 {
			text(b, middle, padTop+plotHeight+18, "middle", 12, Number(size))
		} else {
			width = 0.6 * group / float64(len(modes))
		}
		for _, c := range cells {
			if c.Size != size {
				continue
			}
			i := slices.Index(modes, c.Mode)
			step := width
			if len(sizes) == 1 {
				step = group / float64(len(modes))
			}
			x := middle + step*(float64(i)-float64(len(modes)-1)/2)
			top := y.at(max(c.Value, y.low))
			fmt.Fprintf(b, `<rect x="%.1f" y="%.1f" width="%.1f" height="%.1f" fill="%s"/>`+"\n",
				x-width*0.45, top, width*0.9, max(1, padTop+plotHeight-top), colours[i%len(colours)])
			text(b, x, top-4, "middle", 10, y.label(c.Value))
			if len(sizes) == 1 {
				text(b, x, padTop+plotHeight+18, "middle", 12, c.Mode)
			}
		}
	}
}
