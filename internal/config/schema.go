// SPDX-License-Identifier: Apache-2.0

package config

import (
	"bytes"
	"encoding/json"
	"maps"

	"github.com/fairlead/fairlead/internal/rules"
	runpolicy "github.com/fairlead/fairlead/internal/run/policy"
	"github.com/fairlead/fairlead/internal/yamltree"
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
			"agent": withRun(fileSchema(&agent), object{"allow": runSchema(), "host": askSchema()}),
			"host":  withRun(fileSchema(&host), object{"allow": hostRunSchema()}),
			"rule":  ruleSchema(), "text": object{"type": []string{"string", "number", "boolean"}},
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

// withRun adds to the keys of run those that package runpolicy reads.
func withRun(root, keys object) object {
	maps.Copy(root["properties"].(object)["run"].(object)["properties"].(object), keys)
	return root
}

// hostRunSchema describes what guests may have run.
func hostRunSchema() object {
	_, required := runpolicy.HostKeys()
	properties := programSchema()
	properties["guests"] = object{"description": "the guests that may have it run, by the names that the host has for them; globs", "type": "array", "minItems": 1, "items": object{"$ref": "#/$defs/text"}}
	properties["path"], properties["directory"] = object{"type": "string"}, object{"type": "string"} // also of Windows
	return object{
		"description": "programs of this host that guests may have run; nothing else is run", "type": []string{"array", "null"},
		"items": object{"type": "object", "additionalProperties": false, "required": required, "properties": properties},
	}
}

// askSchema describes who may ask the host for its programs.
func askSchema() object {
	_, required := runpolicy.AskKeys()
	properties := whoSchema()
	properties["name"] = object{"$ref": "#/$defs/text", "description": "of the program in the host's run.allow"}
	return object{
		"description": "who may ask the host for which of its programs; nobody else may", "type": []string{"array", "null"},
		"items": object{
			"type": "object", "additionalProperties": false, "required": required,
			"anyOf":      []object{{"required": []string{"match"}}, {"required": []string{"users"}}},
			"properties": properties,
		},
	}
}

// whoSchema has the fields about who asks.
func whoSchema() object {
	return object{
		"match": object{
			"description": "the containers that are meant", "type": "object", "additionalProperties": false, "minProperties": 1,
			"properties": ownerSchema(),
		},
		"users": object{"description": "users of the guest who may run it without a container, by name or number", "type": "array", "items": object{"$ref": "#/$defs/text"}},
	}
}

// programSchema has the fields about a program.
func programSchema() object {
	path := object{"type": "string", "pattern": "^/"}
	return object{
		"name":      object{"$ref": "#/$defs/text", "description": "by which clients ask for the program"},
		"path":      path,
		"sha256":    object{"type": "string", "pattern": "^[0-9a-f]{64}$"},
		"args":      object{"description": "a regular expression for each argument, which it matches whole", "type": "array", "items": object{"$ref": "#/$defs/text"}},
		"env":       object{"description": "variables that the client may set", "type": "array", "items": object{"type": "string", "pattern": "^[A-Za-z_][A-Za-z0-9_]*$"}},
		"directory": path,
	}
}

// runSchema describes the programs that containers may have run.
func runSchema() object {
	_, required := runpolicy.Keys()
	properties := programSchema()
	maps.Copy(properties, whoSchema())
	properties["tty"] = object{"description": "clients may ask for a terminal", "type": "boolean", "default": false}
	properties["user"] = object{"$ref": "#/$defs/text", "description": "as whom it runs, not root"}
	return object{
		"description": "programs that containers may have run; nothing else is run", "type": []string{"array", "null"},
		"items": object{
			"type": "object", "additionalProperties": false, "required": required,
			"anyOf":      []object{{"required": []string{"match"}}, {"required": []string{"users"}}},
			"properties": properties,
		},
	}
}

// ownerSchema has the fields of a match about an owner.
func ownerSchema() object {
	match := yamltree.Schema(new(rules.Match))["properties"].(object)
	return object{"name": match["name"], "namespace": match["namespace"], "labels": match["labels"]}
}
