// SPDX-License-Identifier: Apache-2.0

package config

import (
	"bytes"
	"encoding/json"
	"strings"

	"github.com/fairlead/fairlead/internal/rules"
)

// object is a JSON object; encoding/json sorts its keys.
type object map[string]any

// Schema returns the JSON Schema (draft 2020-12) of the configuration files of
// agent and host, indented. It is generated from the table of fields, as are flags,
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
			"agent": agentSchema(agent.fields()), "host": schemaOf(host.fields()), "rule": ruleSchema(), "text": textSchema(),
		},
	})
	return b.Bytes()
}

func textSchema() object { return object{"type": []string{"string", "number", "boolean"}} }

// agentSchema adds to the fields what containers may publish.
func agentSchema(fields []field) object {
	root := schemaOf(fields)
	publish := root["properties"].(object)["publish"].(object)
	publish["properties"].(object)["allow"] = object{
		"description": "what containers may ask for at the publish socket; nothing else is allowed", "type": []string{"array", "null"},
		"items": object{
			"type": "object", "additionalProperties": false, "required": []string{"match"},
			"anyOf": []object{{"required": []string{"guestPorts"}}, {"required": []string{"hostPorts"}}},
			"properties": object{
				"match": object{
					"description": "the containers that are meant", "type": "object", "additionalProperties": false, "minProperties": 1,
					"properties": ownerSchema(),
				},
				"guestPorts": portsSchema("ports of the guest's loopback that they may reach"),
				"hostPorts":  portsSchema("ports at which the host may reach them"),
			},
		},
	}
	return root
}

// ownerSchema has the fields of a match about an owner.
func ownerSchema() object {
	text := object{"$ref": "#/$defs/text"}
	return object{
		"name":      object{"description": "the owner's name; `*` is any text, `?` one character", "$ref": "#/$defs/text"},
		"namespace": object{"description": "the owner's namespace; `*` is any text, `?` one character", "$ref": "#/$defs/text"},
		"labels":    object{"description": "labels that the owner has, each with a value; `*` is any text, `?` one character", "type": "object", "additionalProperties": text},
	}
}

// portsSchema is one or more ports and ranges.
func portsSchema(description string) object {
	ports := object{"type": []string{"integer", "string"}, "pattern": `^[0-9]+(-[0-9]+)?( *, *[0-9]+(-[0-9]+)?)*$`, "minimum": 1, "maximum": 65535}
	o := object{"anyOf": []object{ports, {"type": "array", "items": ports, "minItems": 1}}}
	if description != "" {
		o["description"] = description
	}
	return o
}

// schemaOf nests the fields by the dots in their keys.
func schemaOf(fields []field) object {
	root := object{"type": []string{"object", "null"}, "additionalProperties": false, "properties": object{
		"rules": object{
			"description": "the first rule that matches decides", "type": []string{"array", "null"},
			"items": object{"$ref": "#/$defs/rule"},
		},
	}}
	for i := range fields {
		f := &fields[i]
		at := root
		parts := strings.Split(f.key, ".")
		for _, p := range parts[:len(parts)-1] {
			properties := at["properties"].(object)
			if properties[p] == nil {
				properties[p] = object{"type": "object", "additionalProperties": false, "properties": object{}}
			}
			at = properties[p].(object)
		}
		at["properties"].(object)[parts[len(parts)-1]] = f.schema()
	}
	return root
}

// schema describes one field.
func (f *field) schema() object {
	value := f.valueSchema()
	if f.list {
		value = object{"anyOf": []object{value, {"type": "array", "items": value}}}
	}
	value["description"] = f.usage
	var def []any
	for _, s := range f.get() {
		if f.isNumber() {
			def = append(def, json.Number(s))
		} else if s != "" || f.list {
			def = append(def, s)
		}
	}
	switch {
	case len(def) == 0:
	case f.list:
		value["default"] = def
	default:
		value["default"] = def[0]
	}
	return value
}

// valueSchema describes one value of the field.
func (f *field) valueSchema() object {
	switch {
	case f.kind == "duration":
		return object{"type": []string{"string", "number"}, "pattern": `^[+-]?([0-9]+(\.[0-9]*)?(ns|us|µs|ms|s|m|h))+$|^0$`}
	case f.kind == boolKind:
		return object{"enum": []any{true, false, "yes", "no"}}
	case f.isNumber():
		return object{"type": "integer", "minimum": f.least}
	case len(f.words) == 0:
		return object{"$ref": "#/$defs/text"}
	case f.pattern != "":
		return object{"anyOf": []object{{"enum": f.words}, {"type": "string", "pattern": f.pattern}}}
	}
	return object{"enum": f.words}
}

func ruleSchema() object {
	oneOrMore := func(description string, item object) object {
		return object{"description": description, "anyOf": []object{item, {"type": "array", "items": item, "minItems": 1}}}
	}
	match := ownerSchema()
	match["protocol"] = object{"description": "of the port", "enum": []string{"tcp", "udp", "TCP", "UDP"}}
	match["ports"] = portsSchema("ports of the guest, and ranges of them")
	match["address"] = oneOrMore("the guest's address: wildcard, loopback, an address or a CIDR prefix", object{"type": "string", "minLength": 1})
	match["source"] = oneOrMore("who reported the port; kube is the Services of all clusters", object{"enum": rules.Sources()})
	match["guest"] = object{"description": "on a host: the guest's name there, else its endpoint; `*` is any text, `?` one character", "$ref": "#/$defs/text"}
	match["owner"] = oneOrMore("what has the port", object{"enum": []string{"container", "service", "process", "unknown"}})
	return object{
		"type": "object", "additionalProperties": false, "required": []string{"action"},
		"properties": object{
			"name":   object{"description": "how messages name the rule, beside its number", "$ref": "#/$defs/text"},
			"action": object{"description": "what becomes of a port that matches", "enum": []string{"allow", "deny"}},
			"hostPort": object{
				"description": `a port, an offset from the port that is asked for such as "+1000", or 0 for any free port`,
				"type":        []string{"integer", "string"}, "pattern": `^[+-]?[0-9]+$`,
			},
			"onConflict":    object{"description": "on a host, where the port is in use: wait until it is free, open the next free port, or any", "enum": []string{"wait", "next", "any"}},
			"proxyProtocol": object{"description": "on an agent, of TCP: tell the server the client's address by the PROXY protocol", "enum": []string{"v2"}},
			"hostAddress":   object{"description": "loopback, all or an address of the host", "type": "string", "minLength": 1},
			"match": object{
				"description": "the ports that are meant: all keys must match, and one of the values of each; without it, all ports",
				"type":        "object", "additionalProperties": false, "properties": match,
			},
		},
	}
}
