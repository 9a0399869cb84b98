// SPDX-License-Identifier: Apache-2.0

package config

import (
	"bytes"
	"encoding/json"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/fairlead/fairlead/internal/rules"
)

// object is a JSON object; encoding/json sorts its keys.
type object map[string]any

// Schema returns the JSON Schema (draft 2020-12) of the configuration files of
// agent and host. It is made of the same table of fields as flags, environment
// and file, so that it cannot say anything else; it is indented, with a newline
// at its end.
func Schema() []byte {
	agent, host := DefaultAgent(), DefaultHost()
	b := new(bytes.Buffer)
	enc := json.NewEncoder(b)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	// What is encoded has no value that could fail.
	_ = enc.Encode(object{
		"$schema":     "https://json-schema.org/draft/2020-12/schema",
		"title":       "fairlead configuration",
		"description": "agent.yaml of `fairlead agent`, or host.yaml of `fairlead host`",
		"anyOf":       []object{{"$ref": "#/$defs/agent"}, {"$ref": "#/$defs/host"}},
		"$defs": object{
			"agent": schemaOf(agent.fields()), "host": schemaOf(host.fields()), "rule": ruleSchema(), "text": textSchema(),
		},
	})
	return b.Bytes()
}

func textSchema() object { return object{"type": []string{"string", "number", "boolean"}} }

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

// schema describes one field by what its own parser takes.
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

var usageWords = regexp.MustCompile(`[a-z0-9]+`)

// valueSchema tries the words of the usage on the parser: if it takes no word
// that nobody knows, those that it takes are all there are.
func (f *field) valueSchema() object {
	if f.kind == "duration" {
		return object{"type": []string{"string", "number"}, "pattern": `^[+-]?([0-9]+(\.[0-9]*)?(ns|us|µs|ms|s|m|h))+$|^0$`}
	}
	if f.isNumber() {
		return object{"type": "integer", "minimum": f.least()}
	}
	if f.takes("zz-nobody-knows") {
		return object{"$ref": "#/$defs/text"}
	}
	var words []string
	for _, w := range usageWords.FindAllString(f.usage, -1) {
		if f.takes(w) && !slices.Contains(words, w) {
			words = append(words, w)
		}
	}
	switch {
	case len(words) == 0:
		return object{"$ref": "#/$defs/text"}
	case strings.Contains(f.usage, "=URL"):
		return object{"anyOf": []object{{"enum": words}, {"type": "string", "pattern": "^(" + strings.Join(words, "|") + ")="}}}
	case f.takes("192.0.2.1"):
		return object{"anyOf": []object{{"enum": words}, {"type": "string", "pattern": "[.:]"}}}
	}
	return object{"enum": words}
}

func (f *field) isNumber() bool { return f.kind == "n" || f.kind == "cid" || f.kind == "uid" }

// takes reports whether the parser takes the value. The field belongs to a
// configuration that nobody uses.
func (f *field) takes(s string) bool {
	old := f.get()
	ok := f.set([]string{s}) == nil
	_ = f.set(old)
	return ok
}

// least is 0 or 1: whole numbers begin at either.
func (f *field) least() int {
	if f.takes("0") {
		return 0
	}
	return 1
}

func ruleSchema() object {
	text := object{"$ref": "#/$defs/text"}
	oneOrMore := func(item object) object {
		return object{"anyOf": []object{item, {"type": "array", "items": item, "minItems": 1}}}
	}
	ports := object{"type": []string{"integer", "string"}, "pattern": `^[0-9]+(-[0-9]+)?( *, *[0-9]+(-[0-9]+)?)*$`, "minimum": 1, "maximum": 65535}
	return object{
		"type": "object", "additionalProperties": false, "required": []string{"action"},
		"properties": object{
			"name":   text,
			"action": object{"enum": []string{"allow", "deny"}},
			"hostPort": object{
				"description": `a port, an offset from the port that is asked for such as "+1000", or 0 for any free port`,
				"type":        []string{"integer", "string"}, "pattern": `^[+-]?[0-9]+$`,
			},
			"hostAddress": object{"description": "loopback, all or an address of the host", "type": "string", "minLength": 1},
			"match": object{
				"type": "object", "additionalProperties": false,
				"properties": object{
					"protocol": object{"enum": []string{"tcp", "udp", "TCP", "UDP"}},
					"ports":    oneOrMore(ports),
					"address":  oneOrMore(object{"description": "wildcard, loopback, an address or a CIDR prefix", "type": "string", "minLength": 1}),
					"source":   oneOrMore(object{"enum": rules.Sources()}),
					"owner":    oneOrMore(object{"enum": []string{"container", "service", "process", "unknown"}}),
					"name":     text, "namespace": text,
					"labels": object{"type": "object", "additionalProperties": text},
				},
			},
		},
	}
}

// Keys returns the keys that a configuration file of the agent, or of the host,
// can have, sorted, with the flag and the variable of each.
func Keys(host bool) []Key {
	agent, h := DefaultAgent(), DefaultHost()
	fields := agent.fields()
	if host {
		fields = h.fields()
	}
	byKey := map[string]Key{}
	for i := range fields {
		f := &fields[i]
		def := strings.Join(f.get(), ", ")
		if def == "" {
			def = strconv.Quote("")
		}
		byKey[f.key] = Key{Key: f.key, Flag: "--" + f.flag, Variable: f.env(), Default: def, Usage: f.usage}
	}
	var list []Key
	for _, k := range slices.Sorted(maps.Keys(byKey)) {
		list = append(list, byKey[k])
	}
	return list
}

// Key is one setting, as its documentation shows it.
type Key struct{ Key, Flag, Variable, Default, Usage string }
