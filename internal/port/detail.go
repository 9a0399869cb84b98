// SPDX-License-Identifier: Apache-2.0

package port

// Detail is a human-readable line about an origin. The zero value is empty. It is
// immutable.
type Detail struct {
	text string
	lazy Describer
}

// Describer builds the line of a Detail each time it is asked for. It is immutable
// and safe for concurrent use.
type Describer interface {
	String() string
	// Equal reports whether another one builds the same line.
	Equal(Describer) bool
}

// NewDetail returns a line.
func NewDetail(text string) Detail { return Detail{text: text} }

// LazyDetail returns the line that d builds, for text that costs more to build
// than is worth it for what may never be shown.
func LazyDetail(d Describer) Detail { return Detail{lazy: d} }

// String returns the line.
func (d Detail) String() string {
	if d.lazy != nil {
		return d.lazy.String()
	}
	return d.text
}

// Equal reports whether both are the same line.
func (d Detail) Equal(e Detail) bool {
	if d.lazy != nil && e.lazy != nil {
		return d.lazy.Equal(e.lazy)
	}
	return d.String() == e.String()
}
