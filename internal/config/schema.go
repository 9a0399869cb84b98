// SPDX-License-Identifier: Apache-2.0

package config

import (
	"bytes"
	"encoding/json"

	"github.com/fairlead/fairlead/internal/config/rules"
	"github.com/fairlead/fairlead/internal/config/yamltree"
)

type object = yamltree.Object

// Schema returns the JSON Schema (draft 2020-12) of the configuration files of
// agent and host, indented. It is made from the tags of the structs, as are flags,
// environment and file.
func Schema() []byte {
	agent, host := DefaultAgent(), defaultHost(systemDirs())
	b := new(bytes.Buffer)
	enc := json.NewEncoder(b)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	// Nothing in this value can fail to encode.
	_ = enc.Encode(object{
		"$schema":     "https://json-schema.org/draft/2020-12/schema",
		"title":       "fairlead configuration",
		"description": "agent.yaml of `fairlead agent`, or host.yaml of `fairlead host`",
		"anyOf":       []object{{"$ref": "#/$defs/agent"}, {"$ref": "#/$defs/host"}},
		"$defs": object{
			"agent": fileSchema(&agent), "host": fileSchema(&host), "rule": ruleSchema(), "text": object{"type": []string{"string", "number", "boolean"}},
		},
	})
	return b.Bytes()
}

func ruleSchema() object { return yamltree.Schema(new(rules.Rule)) }

// fileSchema describes a file by the configuration that config points at.
func fileSchema(config any) object {
	root := yamltree.Schema(config)
	root["type"] = []string{"object", "null"}
	root["properties"].(object)["rules"] = object{
		"description": "the first rule that matches decides", "type": []string{"array", "null"},
		"items": object{"$ref": "#/$defs/rule"},
	}
	return root
}
