// SPDX-License-Identifier: Apache-2.0

package rules

import (
	"github.com/fairlead/fairlead/internal/config/words"
	"github.com/fairlead/fairlead/internal/config/yamltree"
	"github.com/fairlead/fairlead/internal/port"
)

// File is the content of a rules file.
type File struct {
	Expose HostAddress `key:"expose" words:"loopback,all"` // Asked if the file has none
	Rules  []Rule      `key:"rules" list:"rules (\"- action: allow\")"`
}

// Decoder returns one that reads rules, also within other structs.
func Decoder() *yamltree.Decoder {
	return &yamltree.Decoder{Checks: yamltree.Checks{
		"onConflict":    func(s string) (any, error) { return ParseOnConflict(s) },
		"proxyProtocol": func(s string) (any, error) { return ParseProxyProtocol(s) },
	}}
}

// Parse reads a rules file; name names it in errors. The error joins all mistakes, each
// a *yamltree.Error with line, column, field and what is allowed.
func Parse(name string, data []byte) (File, error) {
	root, err := yamltree.Parse(name, data)
	if err != nil || root.IsNull() {
		return File{}, err
	}
	var f File
	if err := Decoder().Decode(root, &f); err != nil {
		return File{}, err
	}
	return f, nil
}

// ParseList reads a list of rules in a larger document. The error joins all mistakes.
func ParseList(n yamltree.Node) (list []Rule, err error) {
	if err := Decoder().Decode(n, &list, `rules ("- action: allow")`); err != nil {
		return nil, err
	}
	return list, nil
}

// ParseOnConflict reads "wait", "next" or "any".
func ParseOnConflict(s string) (port.OnConflict, error) {
	for _, c := range []port.OnConflict{port.OnConflictWait, port.OnConflictNext, port.OnConflictAny} {
		if s == c.String() {
			return c, nil
		}
	}
	return 0, words.Check(s, "wait", "next", "any")
}

// ParseProxyProtocol reads "v2".
func ParseProxyProtocol(s string) (port.ProxyProtocol, error) {
	return port.ProxyProtocolV2, words.Check(s, port.ProxyProtocolV2.String())
}
