// SPDX-License-Identifier: Apache-2.0

// Package documents checks that the tests that the documents name exist.
package documents

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

const root = "../.."

// named is a test as the documents name it: folder and function.
var named = regexp.MustCompile("`((?:cmd|internal|test)(?:/[\\w.-]+)*) ((?:Test|Fuzz)\\w+)`")

// tests returns the test functions of a folder, whatever their build tags.
func tests(t *testing.T, folder string) map[string]bool {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(root, folder, "*_test.go"))
	if err != nil {
		t.Fatal(err)
	}
	found := make(map[string]bool)
	for _, path := range files {
		f, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range f.Decls {
			if fn, ok := d.(*ast.FuncDecl); ok && fn.Recv == nil {
				found[fn.Name.Name] = true
			}
		}
	}
	return found
}

func TestNamedTestsExist(t *testing.T) {
	documents, err := filepath.Glob(root + "/docs/*.md")
	if err != nil {
		t.Fatal(err)
	}
	known := make(map[string]map[string]bool)
	for _, path := range documents {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range named.FindAllStringSubmatch(string(text), -1) {
			folder, name := m[1], m[2]
			if known[folder] == nil {
				known[folder] = tests(t, folder)
			}
			if !known[folder][name] {
				t.Errorf("%s: no test %s in %s", filepath.Base(path), name, folder)
			}
		}
	}
}

// Each row of a table with a column "shown by" names the tests that show it.
func TestEachDefectHasATest(t *testing.T) {
	for document, rows := range map[string]int{"peers.md": 47, "reliability.md": 20, "security.md": 44} {
		text, err := os.ReadFile(filepath.Join(root, "docs", document))
		if err != nil {
			t.Fatal(err)
		}
		got, within := 0, false
		for line := range strings.Lines(string(text)) {
			switch {
			case !strings.HasPrefix(line, "|"):
				within = false
			case strings.Contains(line, "| shown by |"):
				within = true
			case within && !strings.HasPrefix(line, "|---"):
				got++
				if !named.MatchString(line) {
					t.Errorf("%s: no test in %s", document, line)
				}
			}
		}
		if got != rows {
			t.Errorf("%s has %d rows, want %d", document, got, rows)
		}
	}
}

// The README names no kernel that docs/kernels.md has no column or line for.
func TestReadmeNamesKernelsOfTheMatrix(t *testing.T) {
	readme, err := os.ReadFile(root + "/README.md")
	if err != nil {
		t.Fatal(err)
	}
	kernels, err := os.ReadFile(root + "/docs/kernels.md")
	if err != nil {
		t.Fatal(err)
	}
	_, sentence, found := strings.Cut(string(readme), "it is tested on ")
	sentence, _, ended := strings.Cut(sentence, " (")
	named := regexp.MustCompile(`\d+\.\d+`).FindAllString(sentence, -1)
	if !found || !ended || len(named) == 0 {
		t.Fatalf("README names no kernels: %q", sentence)
	}
	for _, version := range named {
		if !strings.Contains(string(kernels), "Linux "+version) {
			t.Errorf("README names Linux %s, docs/kernels.md does not", version)
		}
	}
}
