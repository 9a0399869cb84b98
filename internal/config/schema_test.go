// SPDX-License-Identifier: Apache-2.0

package config

import (
	"bytes"
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"testing"

	"github.com/goccy/go-yaml"
	"github.com/santhosh-tekuri/jsonschema/v6"
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

// compiled returns the schema of the agent's file.
func compiled(t *testing.T) *jsonschema.Schema {
	t.Helper()
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(Schema()))
	if err != nil {
		t.Fatal(err)
	}
	c := jsonschema.NewCompiler()
	if err := c.AddResource("config.json", doc); err != nil {
		t.Fatal(err)
	}
	s, err := c.Compile("config.json#/$defs/agent")
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// The schema accepts what the loader accepts, and the loader refuses what the schema refuses.
func TestSchemaAgreesWithTheLoader(t *testing.T) {
	s := compiled(t)
	for _, tt := range []struct {
		yaml           string
		loader, schema bool
	}{
		{"", true, true},
		{"holdDown: 150ms", true, true},
		{"holdDown: 1h30m", false, true}, // bounds of durations are the loader's
		{"holdDown: soon", false, false},
		{"holdDwon: 1s", false, false},
		{"auditInterval: 0", true, true},
		{"observer: poll", true, true},
		{"observer: guess", false, false},
		{"source: socket", true, true},
		{"source: [socket, nat]", true, true},
		{"source: [socket, ant]", false, false},
		{"sink: [hostlink]", true, true},
		{"sink: gvproxy=http://192.168.127.1:80", true, true},
		{"sink: teleport", false, false},
		{"expose: all", true, true},
		{"expose: everywhere", false, false},
		{"logLevel: debug", true, true},
		{"logLevel: loud", false, false},
		{"logFormat: json", true, true},
		{"link: unix:///run/x.sock", true, true},
		{"allowCIDs: [2, 3]", true, true},
		{"allowCIDs: [-1]", false, false},
		{"listener: {udp: true}", true, true},
		{"listener: {udp: yes}", true, true},
		{"listener: {udp: perhaps}", false, false},
		{"kube: {context: a, namespaces: [b]}", true, true},
		{"kube: {contxt: a}", false, false},
		{"docker: {hosts: [unix:///run/docker.sock]}", true, true},
		{"rules:", true, true},
		{"publish: {allow: [{match: {name: web}, guestPorts: [80, 90-99]}]}", true, true},
		{"publish: {allow: [{match: {labels: {a: '*'}}, hostPorts: '80, 81'}]}", true, true},
		{"publish: {allow: }", true, true},
		{"publish: {allow: [{match: {name: web}}]}", false, false},
		{"publish: {allow: [{guestPorts: 80}]}", false, false},
		{"publish: {allow: [{match: {}, guestPorts: 80}]}", false, false},
		{"publish: {allow: [{match: {ports: 80}, guestPorts: 80}]}", false, false},
		{"publish: {allow: [{match: {name: web}, guestPorts: 0}]}", false, false},
		{"publish: {allow: {match: {name: web}, guestPorts: 80}}", false, false},
		{"rules: [{action: allow}]", true, true},
		{"rules: [{action: permit}]", false, false},
		{"rules: [{match: {ports: 80}}]", false, false},
		{"rules: [{action: allow, hostPort: +1000, match: {ports: [80, 90-99], protocol: tcp, labels: {a: '*'}}}]", true, true},
		{"rules: [{action: deny, match: {ports: 80x}}]", false, false},
		{"rules: [{action: deny, match: {port: 80}}]", false, false},
		{"rules: [{action: deny, match: {owner: pod}}]", false, false},
	} {
		path := filepath.Join(t.TempDir(), "agent.yaml")
		if err := os.WriteFile(path, []byte(tt.yaml), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := LoadAgent(path, nil, nil); (err == nil) != tt.loader {
			t.Errorf("%q: loader: %v, want ok %v", tt.yaml, err, tt.loader)
		}
		var v any
		if err := yaml.Unmarshal([]byte(tt.yaml), &v); err != nil {
			t.Fatal(err)
		}
		b, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(b))
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Validate(doc); (err == nil) != tt.schema {
			t.Errorf("%q: schema: %v, want ok %v", tt.yaml, err, tt.schema)
		}
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
