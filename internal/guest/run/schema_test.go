// SPDX-License-Identifier: Apache-2.0

//go:build linux

package run

import (
	"bytes"
	"encoding/json"
	"flag"
	"os"
	"testing"

	"github.com/fairlead/fairlead/internal/config/yamltree"
)

var update = flag.Bool("update", false, "write docs/run.schema.json")

// The schema of run.yaml, for editors, is made from the tags by which it is read.
func TestSchemaIsUpToDate(t *testing.T) {
	const file = "../../../docs/run.schema.json"
	schema := yamltree.Schema(new(Config))
	schema["$schema"], schema["title"] = "https://json-schema.org/draft/2020-12/schema", "fairlead-run configuration"
	schema["$defs"] = yamltree.Object{"text": yamltree.Object{"type": []string{"string", "number", "boolean"}}}
	var want bytes.Buffer
	enc := json.NewEncoder(&want)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	if err := enc.Encode(schema); err != nil {
		t.Fatal(err)
	}
	if *update {
		if err := os.WriteFile(file, want.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := os.ReadFile(file); err != nil || !bytes.Equal(got, want.Bytes()) {
		t.Errorf("docs/run.schema.json is out of date (%v): run make docs", err)
	}
}
