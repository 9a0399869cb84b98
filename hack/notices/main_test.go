// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"compress/gzip"
	"io"
	"os"
	"path/filepath"
	"testing"
)

func TestNoticesAreUpToDate(t *testing.T) {
	want, err := generate("../..")
	if err != nil {
		t.Fatal(err)
	}
	file, err := os.Open(filepath.Join("../..", output))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = file.Close() }()
	r, err := gzip.NewReader(file)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(r); err != nil || !bytes.Equal(got, want) {
		t.Errorf("%s is out of date (%v): run make docs", output, err)
	}
	for _, text := range []string{
		"github.com/libp2p/go-yamux/v5 v", "Mozilla Public License", "github.com/Microsoft/go-winio v",
		"GPL-2.0-only OR BSD-2-Clause", "GNU GENERAL PUBLIC LICENSE", "Copyright 2009 The Go Authors",
	} {
		if !bytes.Contains(want, []byte(text)) {
			t.Errorf("the notices lack %q", text)
		}
	}
}

func TestOnlyAllowedLicences(t *testing.T) {
	for name, want := range map[string]string{
		"LICENSE": "Apache-2.0", "LICENSES/BSD-2-Clause.txt": "BSD-2-Clause", "LICENSES/GPL-2.0-only.txt": "",
	} {
		b, err := os.ReadFile(filepath.Join("../..", name))
		if err != nil {
			t.Fatal(err)
		}
		if got := licence(string(b)); got != want {
			t.Errorf("%s is %q, want %q", name, got, want)
		}
	}
	mit := "Permission is hereby granted, free\nof charge, to any person obtaining a copy"
	for text, want := range map[string]string{
		mit: "MIT",
		mit + "\n\nThis file is part of x, under the GNU General Public License.": "",
		"All rights reserved.": "",
		"Mozilla Public License Version 2.0 ... GNU General Public License":   "MPL-2.0",
		"Apache License\nVersion 2.0\n\n\"Commons Clause\" License Condition": "",
	} {
		if got := licence(text); got != want {
			t.Errorf("%q is %q, want %q", text, got, want)
		}
	}
}

// A module without a licence, or under one that is not allowed, is refused.
func TestModuleWithoutAnAllowedLicence(t *testing.T) {
	for name, files := range map[string]map[string]string{
		"none":            {"a.go": "package a"},
		"a notice alone":  {"NOTICE": "Copyright someone"},
		"not allowed":     {"LICENSE": "All rights reserved."},
		"beside another":  {"LICENSE": "Apache License\nVersion 2.0", "COPYING": "GNU General Public License"},
		"of a subpackage": {"LICENSE": "Apache License\nVersion 2.0", "sub/LICENSE": "GNU Affero General Public License"},
	} {
		dir := t.TempDir()
		m := module{
			path: "example.com/m", version: "v1.0.0", dir: dir, licences: map[string]bool{},
			packages: map[string]bool{dir: true, filepath.Join(dir, "sub"): true},
		}
		if err := os.Mkdir(filepath.Join(dir, "sub"), 0o755); err != nil {
			t.Fatal(err)
		}
		for file, text := range files {
			if err := os.WriteFile(filepath.Join(dir, file), []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := m.add(nil); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}
