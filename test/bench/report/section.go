// SPDX-License-Identifier: Apache-2.0

package report

// Section is a part of the document: what is measured, in words, and how the
// cells of one part are drawn. Tables are made of every cell by themselves.
type Section struct {
	Name  string // of the part, as in -only and in Cell.Part
	Title string
	About string // what is measured and how; Markdown, one paragraph or more
	// Base is the mode that the others are compared with; without one it is the
	// first mode of each measure.
	Base    string
	Figures []Figure
	// Reading says what the figures mean, in plain words: Markdown, made from this
	// run's cells. It says nothing where they are absent or failed. It may be nil.
	Reading func(*Results) string
}

// Figure is a drawing of the cells of one measure.
type Figure struct {
	File  string // name of the SVG, without its ending
	Title string
	// Measure is whose cells are drawn, one line or group of bars for each mode.
	Measure string
	Kind    Kind
	X, Y    string // what the axes show
	LogX    bool
	LogY    bool
}

// Kind is how a figure shows its cells.
type Kind int

const (
	// Lines has the size on the x axis and the value on the y axis.
	Lines Kind = iota
	// Bars has groups of bars, one group for each size.
	Bars
	// Distribution has the value on the x axis and the share of samples that do
	// not exceed it on the y axis.
	Distribution
)
