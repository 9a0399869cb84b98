// SPDX-License-Identifier: Apache-2.0

package documents

import (
	"bytes"
	"encoding/xml"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"unicode/utf8"
)

var update = flag.Bool("update", false, "write docs/ls.svg")

// The size of a character, and the space around the text, in pixels.
const charWidth, lineHeight, margin = 8.4, 18.0, 14.0

// paint are words with the colours that a terminal gives them.
var paint = []struct {
	words *regexp.Regexp
	fill  string
}{
	{regexp.MustCompile(`^\$ .*|^Next:`), "#79c0ff"},
	{regexp.MustCompile(`^PORT .*`), "#8b949e"},
	{regexp.MustCompile(`  active  |  ok  `), "#56d364"},
	{regexp.MustCompile(`  conflict  |  FAIL  `), "#ff7b72"},
	{regexp.MustCompile(`  denied  `), "#e3b341"},
}

// picture draws a transcript as a terminal shows it.
func picture(lines []string) string {
	columns := 0
	for _, l := range lines {
		columns = max(columns, utf8.RuneCountInString(l))
	}
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" width="%.0f" height="%.0f" role="img" aria-label="fairlead in a terminal">
<rect width="100%%" height="100%%" rx="8" fill="#0d1117"/>
<g font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace" font-size="14" fill="#c9d1d9" style="white-space:pre" xml:space="preserve">
`, float64(columns)*charWidth+2*margin, float64(len(lines))*lineHeight+2*margin)
	for i, l := range lines {
		if l == "" {
			continue
		}
		var text bytes.Buffer
		_ = xml.EscapeText(&text, []byte(l)) // a buffer does not fail
		line := text.String()
		for _, p := range paint {
			line = p.words.ReplaceAllString(line, `<tspan fill="`+p.fill+`">$0</tspan>`)
		}
		fmt.Fprintf(&b, `<text x="%.0f" y="%.0f" textLength="%.1f">%s</text>`+"\n",
			margin, margin+float64(i+1)*lineHeight-5, float64(utf8.RuneCountInString(l))*charWidth, line)
	}
	return b.String() + "</g>\n</svg>\n"
}

// The picture in the README is drawn from transcripts in docs/cli.md, which test/e2e
// compares with the commands' output: `fairlead ls` in 80 columns, and an explanation.
func TestPictureIsUpToDate(t *testing.T) {
	doc, err := os.ReadFile(filepath.Join(root, "docs/cli.md"))
	if err != nil {
		t.Fatal(err)
	}
	var lines []string
	for _, command := range []string{"fairlead ls", "fairlead explain 8080"} {
		m := regexp.MustCompile("(?m)^" + regexp.QuoteMeta("$ "+command) + "\n(?:[^$`].*\n|\n)*").FindString(string(doc))
		if m == "" {
			t.Fatalf("docs/cli.md has no transcript of %q", command)
		}
		lines = append(lines, strings.Split(strings.TrimSpace(m), "\n")...)
	}
	for _, l := range lines {
		if utf8.RuneCountInString(l) > 80 {
			t.Errorf("more than 80 columns: %s", l)
		}
	}
	path, want := filepath.Join(root, "docs/ls.svg"), picture(lines)
	if *update {
		if err := os.WriteFile(path, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := os.ReadFile(path); err != nil || string(got) != want {
		t.Errorf("docs/ls.svg is out of date (%v): run make docs", err)
	}
}
