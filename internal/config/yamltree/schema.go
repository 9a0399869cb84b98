// SPDX-License-Identifier: Apache-2.0

package yamltree

import (
	"encoding/json"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Object is a JSON object; encoding/json sorts its keys.
type Object map[string]any

// TextSchema is the name under which a document of JSON Schema defines any text, number or bool.
const TextSchema = "#/$defs/text"

const durationPattern = `^[+-]?([0-9]+(\.[0-9]*)?(ns|us|µs|ms|s|m|h))+$|^0$`

// Schema describes the struct that to points at in JSON Schema (draft 2020-12), by the tags of
// [Field] and these:
//
//	types    the JSON types of a text, separated by commas
//	pattern  the regular expression of a text
//	enum     the words of a text that its own type checks
//	either   fields with one value of this tag: one of them is needed
//	keys     "some" of a mapping that may not be empty
//	default  "yes": the value that the field has now is the default
func Schema(to any) Object { return schemaOf(reflect.ValueOf(to).Elem(), nil) }

func schemaOf(v reflect.Value, only []string) Object {
	properties, either := Object{}, []Object{}
	o := Object{"type": "object", "additionalProperties": false, "properties": properties}
	var required []string
	for _, f := range keys(v, "") {
		if only != nil && !slices.Contains(only, f.Key) {
			continue
		}
		properties[f.Key] = f.schema()
		if f.Tag.Get("need") != "" {
			required = append(required, f.Key)
		}
		if f.Tag.Get("either") != "" {
			either = append(either, Object{"required": []string{f.Key}})
		}
	}
	if required != nil {
		o["required"] = required
	}
	if len(either) > 0 {
		o["anyOf"] = either
	}
	return o
}

// schema describes one key.
func (f Field) schema() Object {
	o := f.one(f.Value.Type())
	switch {
	case f.isMapping():
		o = schemaOf(f.Value, f.only())
		if f.Tag.Get("keys") == "some" {
			o["minProperties"] = 1
		}
	case f.Tag.Get("list") != "":
		o = Object{"type": []string{"array", "null"}, "items": schemaOf(reflect.New(f.Value.Type().Elem()).Elem(), nil)}
	case f.IsList():
		value := f.one(f.Value.Type().Elem())
		several := Object{"type": "array", "items": value}
		if f.Tag.Get("some") != "" {
			several["minItems"] = 1
		}
		o = Object{"anyOf": []Object{value, several}}
	}
	if help := f.Tag.Get("help"); help != "" {
		o["description"] = help
	}
	if def := f.defaultOf(); def != nil {
		o["default"] = def
	}
	return o
}

// one describes one value.
func (f Field) one(t reflect.Type) Object {
	tag := f.Tag
	switch list := f.Words(); {
	case list != nil && tag.Get("or") != "":
		return Object{"anyOf": []Object{{"enum": list}, {"type": "string", "pattern": tag.Get("or")}}}
	case list != nil:
		return Object{"enum": list}
	case tag.Get("types") != "":
		o := Object{"type": tag.Get("types")}
		if list := strings.Split(tag.Get("types"), ","); len(list) > 1 {
			o["type"] = list
		}
		if pattern := tag.Get("pattern"); pattern != "" {
			o["pattern"] = pattern
		}
		return o.bounded(tag)
	case t == reflect.TypeFor[time.Duration]():
		return Object{"type": []string{"string", "number"}, "pattern": durationPattern}
	case t.Kind() == reflect.Bool:
		return Object{"enum": []any{true, false, "yes", "no"}}
	case t.Kind() == reflect.Int || t.Kind() == reflect.Uint32:
		return Object{"type": "integer"}.bounded(tag)
	case t.Kind() == reflect.Map:
		return Object{"type": "object", "additionalProperties": Object{"$ref": TextSchema}}
	}
	return Object{"$ref": TextSchema}
}

// bounded adds the limits of a number.
func (o Object) bounded(tag reflect.StructTag) Object {
	for name, limit := range map[string]string{"minimum": tag.Get("min"), "maximum": tag.Get("max")} {
		if n, err := strconv.Atoi(limit); err == nil {
			o[name] = n
		}
	}
	return o
}

// defaultOf returns what the field has now, nil for nothing.
func (f Field) defaultOf() any {
	if f.Tag.Get("flag") == "" {
		return nil
	}
	var list []any
	for _, s := range f.Texts() {
		if _, err := strconv.Atoi(s); err == nil {
			list = append(list, json.Number(s))
		} else if s != "" || f.IsList() {
			list = append(list, s)
		}
	}
	switch {
	case len(list) == 0:
		return nil
	case f.IsList():
		return list
	}
	return list[0]
}
