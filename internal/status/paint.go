// SPDX-License-Identifier: Apache-2.0

package status

// Color is the parameter of an SGR sequence (ECMA-48); empty for plain text.
type Color string

// The colours in use. Each is readable on dark and on light background.
const (
	Plain  Color = ""
	Bold   Color = "1"
	Red    Color = "31"
	Green  Color = "32"
	Yellow Color = "33"
)

// Painter adds colours to text. The zero value adds none.
type Painter struct{ On bool }

// Paint returns s in colour c.
func (p Painter) Paint(c Color, s string) string {
	if !p.On || c == Plain {
		return s
	}
	return "\x1b[" + string(c) + "m" + s + "\x1b[0m"
}
