// SPDX-License-Identifier: Apache-2.0

package main

import (
	"io"
	"os"
	"strconv"

	"golang.org/x/term"

	"github.com/fairlead/fairlead/internal/status"
)

// painter uses colours if w is a terminal that supports them, unless NO_COLOR is set
// (https://no-color.org).
func painter(w io.Writer) status.Painter {
	f, ok := w.(*os.File)
	return status.Painter{On: ok && term.IsTerminal(int(f.Fd())) && os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb"}
}

// width returns the columns that a table must fit in: COLUMNS, or else the width of
// the terminal. It is 0, for unlimited, in a wide table, a pipe or a file.
func width(w io.Writer, wide bool) int {
	if wide {
		return 0
	}
	if n, err := strconv.Atoi(os.Getenv("COLUMNS")); err == nil && n > 0 {
		return n
	}
	if f, ok := w.(*os.File); ok {
		if n, _, err := term.GetSize(int(f.Fd())); err == nil {
			return n
		}
	}
	return 0
}
