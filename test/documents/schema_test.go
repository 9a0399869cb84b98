// SPDX-License-Identifier: Apache-2.0

package documents

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/goccy/go-yaml"
	"github.com/santhosh-tekuri/jsonschema/v6"

	"github.com/fairlead/fairlead/internal/config"
)

// compiled returns the schema of the agent's file.
func compiled(t *testing.T) *jsonschema.Schema {
	t.Helper()
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(config.Schema()))
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
		if _, err := config.LoadAgent(path, nil, nil); (err == nil) != tt.loader {
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
