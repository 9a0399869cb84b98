// SPDX-License-Identifier: Apache-2.0

package documents

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"unicode"
)

// pages returns the text of each document of the repository, by its path from the root.
func pages(t *testing.T) map[string]string {
	t.Helper()
	texts := make(map[string]string)
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		switch {
		case d.IsDir() && name != "." && (strings.HasPrefix(d.Name(), ".") || d.Name() == "dist" || d.Name() == "LICENSES" || d.Name() == "testdata"):
			return fs.SkipDir
		case filepath.Ext(name) == ".md":
			b, err := os.ReadFile(path)
			texts[filepath.ToSlash(name)] = string(b)
			return err
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return texts
}

// A hurried reader has five minutes. What is generated counts; the changelog, which is one page, does not.
func TestDocumentsStayShort(t *testing.T) {
	most := map[string]int{"README.md": 900, "docs/architecture.md": 1500}
	all := 0
	for name, text := range pages(t) {
		n := len(strings.Fields(text))
		if limit, ok := most[name]; ok && n > limit {
			t.Errorf("%s has %d words: want at most %d", name, n, limit)
		}
		if name != "CHANGELOG.md" {
			all += n
		}
	}
	if all > 35_000 {
		t.Errorf("all documents have %d words: want at most 35,000", all)
	}
}

// Each page says first for whom it is, and the index leads to it.
func TestEachPageHasAReader(t *testing.T) {
	all := pages(t)
	for name, text := range all {
		page, ok := strings.CutPrefix(name, "docs/")
		if !ok || page == "README.md" {
			continue
		}
		if !strings.Contains(all["docs/README.md"], "]("+page+")") {
			t.Errorf("docs/README.md does not lead to %s", page)
		}
		first := paragraph(text)
		if !strings.HasPrefix(first, "For ") {
			t.Errorf("%s does not begin with its readers: %q", name, first)
		}
	}
}

// paragraph returns the first text below the title.
func paragraph(page string) string {
	for _, p := range strings.Split(page, "\n\n") {
		if p = strings.TrimSpace(p); !strings.HasPrefix(p, "# ") && !strings.HasPrefix(p, "<!--") {
			return p
		}
	}
	return ""
}

var (
	fenced  = regexp.MustCompile("(?ms)^ *```.*?^ *```")
	link    = regexp.MustCompile(`\]\(([^)#\s]*)(#[^)\s]*)?\)`)
	heading = regexp.MustCompile(`(?m)^#+ (.*)$`)
)

// anchors returns the fragments by which others can lead to the headings of a page.
func anchors(page string) map[string]bool {
	found := make(map[string]bool)
	for _, m := range heading.FindAllStringSubmatch(fenced.ReplaceAllString(page, ""), -1) {
		found["#"+strings.Map(func(r rune) rune {
			switch {
			case r == ' ':
				return '-'
			case unicode.IsLetter(r), unicode.IsDigit(r), r == '-', r == '_':
				return unicode.ToLower(r)
			}
			return -1
		}, m[1])] = true
	}
	return found
}

// Each link within the repository leads to a file, and to a heading of it.
func TestLinksLeadSomewhere(t *testing.T) {
	all := pages(t)
	for name, text := range all {
		for _, m := range link.FindAllStringSubmatch(fenced.ReplaceAllString(text, ""), -1) {
			target, fragment := m[1], m[2]
			if strings.Contains(target, "://") || strings.Contains(target, "{{") || name == "test/bench/report.md" {
				continue // elsewhere, or a link of the report that is made from this template
			}
			file := name
			if target != "" {
				file = filepath.ToSlash(filepath.Join(filepath.Dir(name), target))
			}
			if _, err := os.Stat(filepath.Join(root, file)); err != nil {
				t.Errorf("%s: %v", name, err)
			}
			if fragment != "" && !anchors(all[file])[fragment] {
				t.Errorf("%s: %s has no heading %s", name, file, fragment)
			}
		}
	}
}

// The README shows what commands print, before it says anything else: lines of docs/cli.md,
// which test/e2e compares with the commands.
func TestReadmeShowsWhatCommandsPrint(t *testing.T) {
	all := pages(t)
	before, block, _ := strings.Cut(all["README.md"], "\n```\n")
	block, _, _ = strings.Cut(block, "\n```\n")
	if n := strings.Count(before, "\n"); n > 10 || !strings.Contains(block, "$ fairlead ls\n") || !strings.Contains(block, "$ fairlead explain ") {
		t.Errorf("after %d lines:\n%s", n, block)
	}
	for line := range strings.Lines(block) {
		if line = strings.TrimSpace(line); line != "…" && !strings.Contains(all["docs/cli.md"], line) {
			t.Errorf("docs/cli.md does not show %q", line)
		}
	}
}
