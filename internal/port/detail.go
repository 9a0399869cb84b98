// SPDX-License-Identifier: Apache-2.0

package port

// Detail is a human-readable line about an origin. The zero value is empty. It is
// immutable.
type Detail struct{ of Describer }

// Describer builds the line of a Detail each time it is asked for. It is immutable
// and safe for concurrent use.
type Describer interface {
	String() string
	// Equal reports whether another one builds the same line.
	Equal(Describer) bool
}

// text is a line that need not be built.
type text string

func (t text) String() string { return string(t) }

func (t text) Equal(d Describer) bool { return d.String() == string(t) }

// NewDetail returns a line.
func NewDetail(line string) Detail {
	if line == "" {
		return Detail{}
	}
	return Detail{text(line)}
}

// LazyDetail returns the line that d builds, for text that costs more to build
// than is worth it for what may never be shown.
func LazyDetail(d Describer) Detail { return Detail{d} }

// String returns the line.
func (d Detail) String() string {
	if d.of == nil {
		return ""
	}
	return d.of.String()
}

// Equal reports whether both are the same line.
func (d Detail) Equal(e Detail) bool {
	if _, is := e.of.(text); is || d.of == nil || e.of == nil {
		return d.String() == e.String()
	}
	return d.of.Equal(e.of)
}
