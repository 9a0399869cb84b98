// SPDX-License-Identifier: Apache-2.0

package config

import (
	"bytes"
	"flag"
	"os"
	"testing"
)

var update = flag.Bool("update", false, "write the schema to docs")

const schemaFile = "../../docs/config.schema.json"

func TestSchemaIsUpToDate(t *testing.T) {
	if *update {
		if err := os.WriteFile(schemaFile, Schema(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(schemaFile)
	if err != nil || !bytes.Equal(got, Schema()) {
		t.Errorf("docs/config.schema.json is out of date (%v): go test ./internal/config -update", err)
	}
}

// The declared words are those that the parser accepts.
func TestDeclaredValuesAreAccepted(t *testing.T) {
	for _, s := range subjects() {
		for _, f := range s.fields {
			if f.Key == "" || f.usage == "" {
				t.Errorf("%s: %+v lacks a key or a description", s.name, f)
			}
			for _, w := range f.Words() {
				if err := f.Set(checks(), w); err != nil {
					t.Errorf("%s: %s does not accept %q: %v", s.name, f.Key, w, err)
				}
			}
			isNumber := f.kind == "n" || f.kind == "cid" || f.kind == "uid"
			accepts := f.Set(checks(), "zz-unknown") == nil
			if closed := len(f.Words()) > 0 || isNumber || f.kind == "duration" || f.kind == "bool"; closed && accepts {
				t.Errorf("%s: %s accepts any word", s.name, f.Key)
			}
			if isNumber && f.Tag.Get("min") != "0" && f.Set(checks(), "0") == nil {
				t.Errorf("%s: %s accepts 0", s.name, f.Key)
			}
		}
	}
}
