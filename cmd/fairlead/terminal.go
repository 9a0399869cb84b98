// SPDX-License-Identifier: Apache-2.0

package main

import (
	"io"
	"os"

	"golang.org/x/term"

	"github.com/fairlead/fairlead/internal/status"
)

// painter paints if w is a terminal that takes colours and nobody asked for
// none (https://no-color.org).
func painter(w io.Writer) status.Painter {
	f, ok := w.(*os.File)
	return status.Painter{On: ok && term.IsTerminal(int(f.Fd())) && os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb"}
}
