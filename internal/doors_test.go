// SPDX-License-Identifier: Apache-2.0

// Package internal_test checks that the folders of internal are what docs/architecture.md shows.
package internal_test

import (
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// doors are the folders of internal, each with the others whose packages its own may import. Only
// tests import testkit.
var doors = map[string][]string{
	"port":    {},
	"config":  {"port"},
	"link":    {"port", "config"},
	"status":  {"port", "config", "link"},
	"guest":   {"port", "config", "link", "status"},
	"host":    {"port", "config", "link", "status"},
	"setup":   {"port", "config", "link", "status", "guest"},
	"testkit": {"port", "config", "link", "status", "guest"},
}

// Files of all systems count. No door that another imports leads back to it, so guest and host
// do not import each other by way of a third either.
func TestDoors(t *testing.T) {
	used := make(map[string]bool)
	err := filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || filepath.Ext(path) != ".go" || strings.HasSuffix(path, "_test.go") {
			return err
		}
		from, _, _ := strings.Cut(filepath.ToSlash(path), "/")
		may, ok := doors[from]
		if used[from] = true; !ok {
			t.Errorf("%s is behind no door", path)
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ImportsOnly)
		if err != nil {
			return err
		}
		for _, i := range file.Imports {
			name, ok := strings.CutPrefix(strings.Trim(i.Path.Value, `"`), "github.com/fairlead/fairlead/internal/")
			to, _, _ := strings.Cut(name, "/")
			if ok && to != from && !slices.Contains(may, to) {
				t.Errorf("%s imports %s: %s knows nothing of %s", path, name, from, to)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(used) != len(doors) {
		t.Errorf("there are packages behind %v alone", used)
	}
}
