// SPDX-License-Identifier: Apache-2.0

package status

// Color is how a word stands out on a terminal: the parameter of an SGR
// sequence (ECMA-48), empty for plain.
type Color string

// The colours that are used. Each is readable on dark and on light ground.
const (
	Plain  Color = ""
	Bold   Color = "1"
	Red    Color = "31"
	Green  Color = "32"
	Yellow Color = "33"
)

// Painter paints words, or, as its zero value, does not.
type Painter struct{ On bool }

// Paint returns s in colour c.
func (p Painter) Paint(c Color, s string) string {
	if !p.On || c == Plain {
		return s
	}
	return "\x1b[" + string(c) + "m" + s + "\x1b[0m"
}
