// SPDX-License-Identifier: Apache-2.0

package report

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
)

// Document is what a report has beside results.
type Document struct {
	Sections []Section
}

// Write writes the document with no figures.
func Write(w io.Writer, r *Results, d Document) error {
	_, err := io.WriteString(w, d.markdown(r))
	return err
}

// WriteDir writes README.md and its figures to a directory.
func WriteDir(dir string, r *Results, d Document) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "README.md"), []byte(d.markdown(r)), 0o644)
}

func (d Document) markdown(r *Results) string {
	var b bytes.Buffer
	for _, s := range d.Sections {
		var cells []Cell
		for _, c := range r.Cells {
			if c.Part == s.Name {
				cells = append(cells, c)
			}
		}
		if len(cells) == 0 {
			continue
		}
		fmt.Fprintf(&b, "\n## %s\n\n%s\n", s.Title, strings.TrimSpace(s.About))
		for _, g := range group(cells) {
			fmt.Fprintf(&b, "\n**%s**\n\n", g[0].Measure)
			table(&b, g, s.Base)
		}
	}
	return b.String()
}
