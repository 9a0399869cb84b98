// SPDX-License-Identifier: Apache-2.0

// Package yamltree reads YAML strictly. Each value knows its file, line, column and
// field, so that an error names its position and what is allowed. Only plain YAML is
// accepted: no anchors, aliases, merge keys or tags.
package yamltree

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/lexer"
	"github.com/goccy/go-yaml/parser"
	"github.com/goccy/go-yaml/token"

	"github.com/fairlead/fairlead/internal/config/words"
)

// MaxSize is the size of the largest document that is read, in bytes.
const MaxSize = 256 << 10

// ByteOrderMark may be at the beginning of a document, where editors of Windows put it.
const ByteOrderMark = "\ufeff"

// Error is a mistake in one value.
type Error struct {
	File   string
	Line   int    // 1-based, 0 if the whole file is meant
	Column int    // 1-based, in characters
	Field  string // "rules[2].match.ports", empty for the whole document
	Reason string // the value, and what is allowed
	Key    string // an unknown one; empty of other mistakes
}

// Error returns "FILE:LINE:COLUMN: FIELD: REASON", without what is unknown, as one line.
func (e *Error) Error() string {
	var b strings.Builder
	b.WriteString(e.File)
	if e.Line > 0 {
		fmt.Fprintf(&b, ":%d:%d", e.Line, e.Column)
	}
	if e.Field != "" {
		b.WriteString(": " + e.Field)
	}
	return b.String() + ": " + e.Reason
}

// Node is one value of a document. The zero Node is null.
type Node struct {
	file, field  string
	line, column int
	node         ast.Node
}

// Parse reads one document; an empty one is null. File names it in errors.
func Parse(file string, data []byte) (Node, error) {
	n := Node{file: file}
	if len(data) > MaxSize {
		return n, n.Errorf("%d bytes: want at most %d", len(data), MaxSize)
	}
	if isUTF16(data) {
		return n, n.Errorf("UTF-16 text: want UTF-8: save it as that, in PowerShell with `Set-Content -Encoding utf8` in place of >")
	}
	data = bytes.TrimPrefix(data, []byte(ByteOrderMark))
	data = bytes.ReplaceAll(data, []byte("\r\n"), []byte("\n")) // the parser counts the line after a comment twice
	tokens := lexer.Tokenize(string(data))
	if t := tooDeep(tokens); t != nil {
		n.line, n.column = position(t)
		return n, n.Errorf("lists and mappings are nested more than %d deep", maxDepth)
	}
	f, err := parser.Parse(tokens, 0)
	if err != nil {
		return n, syntaxError(n, err)
	}
	for i, d := range f.Docs {
		switch {
		case d.Body == nil || d.Body.Type() == ast.NullType:
		case i > 0:
			n.locate(d.Body)
			return n, n.Errorf("a second document: want one")
		default:
			n.node = d.Body
		}
	}
	n.locate(n.node)
	return n, nil
}

// maxDepth bounds how deep lists and mappings are nested: the parser's time grows with the square
// of the depth. Lists of the form "- - -" are counted by their columns, two for each.
const maxDepth = 100

// tooDeep returns the first token beyond maxDepth, nil if there is none.
func tooDeep(tokens token.Tokens) *token.Token {
	depth := 0
	for _, t := range tokens {
		switch t.Type {
		case token.SequenceStartType, token.MappingStartType:
			depth++
		case token.SequenceEndType, token.MappingEndType:
			depth--
		}
		if _, column := position(t); depth > maxDepth || t.Type == token.SequenceEntryType && column > 2*maxDepth {
			return t
		}
	}
	return nil
}

// isUTF16 reports whether data begins as a text in UTF-16, with or without a byte order mark.
func isUTF16(data []byte) bool {
	if len(data) < 2 {
		return false
	}
	a, b := data[0], data[1]
	return a == 0xff && b == 0xfe || a == 0xfe && b == 0xff || (a == 0) != (b == 0)
}

func syntaxError(n Node, err error) error {
	reason := err.Error()
	if e, ok := errors.AsType[yaml.Error](err); ok {
		reason = e.GetMessage()
		n.line, n.column = position(e.GetToken())
	}
	reason, _, _ = strings.Cut(reason, "\n")
	for _, m := range mistakes {
		if strings.Contains(reason, m.library) {
			reason = m.plain
		}
	}
	if strings.Contains(reason, "alias") {
		reason += ` (quote a value that begins with "*")`
	}
	return n.Errorf("%s", reason)
}

// mistakes are frequent ones, as the YAML library calls them and as people do.
var mistakes = []struct{ library, plain string }{
	{"cannot start any token", "a tab at the beginning of a line: want spaces"},
	{"tab character cannot use", "a tab at the beginning of a line: want spaces"},
	{"-quoted text", "a quoted text without its end: want the same quotation mark after it"},
	{"mapping value is not allowed", `a mapping where a value began: quote a value that has ": " in it, or begin the mapping on a line of its own`},
	{"sequence end token ']' not found", `a list without its end: want "]"`},
	{"flow mapping end token '}'", `a mapping without its end: want "}"`},
	{"non-map value is specified", `a line that does not fit the lines before it: want the same indentation, and "key: value" or "- value" as there`},
}

func position(t *token.Token) (line, column int) {
	if t == nil || t.Position == nil {
		return 0, 0
	}
	return t.Position.Line, t.Position.Column
}

func (n *Node) locate(at ast.Node) {
	if at == nil {
		return
	}
	if m, ok := at.(*ast.MappingNode); ok && !m.IsFlowStyle && len(m.Values) > 0 {
		at = m.Values[0].Key // a block mapping's own token is its first colon
	}
	n.line, n.column = position(at.GetToken())
}

func (n Node) child(field string, node ast.Node) Node {
	c := Node{file: n.file, field: field, line: n.line, column: n.column, node: node}
	c.locate(node)
	return c
}

// IsNull reports whether there is no value.
func (n Node) IsNull() bool { return n.node == nil || n.node.Type() == ast.NullType }

// IsList reports whether the value is a sequence.
func (n Node) IsList() bool { _, ok := n.node.(*ast.SequenceNode); return ok }

// Where returns "FILE:LINE:COLUMN".
func (n Node) Where() string { return fmt.Sprintf("%s:%d:%d", n.file, n.line, n.column) }

// Errorf returns an *Error at this value.
func (n Node) Errorf(format string, args ...any) error {
	return &Error{File: n.file, Line: n.line, Column: n.column, Field: n.field, Reason: fmt.Sprintf(format, args...)}
}

// Entry is one key of a mapping with its value.
type Entry struct {
	Key string
	Node
}

// Map returns the entries of a mapping in order. Known lists the allowed keys; if it is
// empty, all are. The error joins all mistakes in the keys; the other entries are
// returned with it.
func (n Node) Map(known ...string) ([]Entry, error) {
	m, ok := n.node.(*ast.MappingNode)
	if !ok {
		return nil, n.Errorf("%s: want a mapping (key: value)", n.describe())
	}
	var errs []error
	entries := make([]Entry, 0, len(m.Values))
	seen := make(map[string]bool, len(m.Values))
	listed := false // the known keys, in an error
	for _, v := range m.Values {
		at := n.child(n.field, v.Key)
		if v.Key.IsMergeKey() {
			errs = append(errs, at.Errorf("merge keys (<<) are not supported: write the keys out"))
			continue
		}
		key, err := at.Text()
		if err != nil {
			errs = append(errs, err)
			continue
		}
		field := key
		if strings.ContainsFunc(key, func(r rune) bool { return !unicode.IsPrint(r) }) {
			field = strconv.Quote(key)
		}
		if n.field != "" {
			field = n.field + "." + field
		}
		if len(known) > 0 && !slices.Contains(known, key) {
			errs = append(errs, at.unknown(key, known, listed))
			listed = listed || words.Suggest(key, known) == ""
			continue
		}
		if seen[key] {
			errs = append(errs, at.Errorf("key %q is given twice", key))
			continue
		}
		seen[key] = true
		c := at.child(field, v.Value)
		if c.IsNull() {
			c.line, c.column = at.line, at.column
		}
		entries = append(entries, Entry{key, c})
	}
	return entries, errors.Join(errs...)
}

// unknown is the error of an unknown key: with the likely one, or else with all unless
// these were listed.
func (n Node) unknown(key string, known []string, listed bool) error {
	why := words.Suggest(key, known)
	if why == "" && !listed {
		why = ": want " + words.OneOf(known)
	}
	return &Error{File: n.file, Line: n.line, Column: n.column, Field: n.field, Reason: fmt.Sprintf("unknown key %q%s", key, why), Key: key}
}

// List returns the values of a sequence; any other value is a list of itself.
func (n Node) List() []Node {
	s, ok := n.node.(*ast.SequenceNode)
	if !ok {
		return []Node{n}
	}
	nodes := make([]Node, len(s.Values))
	for i, v := range s.Values {
		nodes[i] = n.child(fmt.Sprintf("%s[%d]", n.field, i), v)
	}
	return nodes
}

// Text returns a scalar as it is written (+1000 stays "+1000"), without quotes.
func (n Node) Text() (string, error) {
	if n.IsNull() {
		return "", n.Errorf("no value: give one, or leave the key out")
	}
	switch v := n.node.(type) {
	case *ast.StringNode:
		return v.Value, nil
	case *ast.LiteralNode:
		return v.Value.Value, nil
	case *ast.IntegerNode, *ast.FloatNode, *ast.BoolNode, *ast.InfinityNode, *ast.NanNode:
		return v.GetToken().Value, nil
	}
	return "", n.Errorf("%s: want one value", n.describe())
}

func (n Node) describe() string {
	if n.IsNull() {
		return "no value"
	}
	switch v := n.node.(type) {
	case *ast.MappingNode:
		return "a mapping"
	case *ast.SequenceNode:
		return "a list"
	case *ast.AliasNode:
		return `an alias, which is not supported (quote a value that begins with "*")`
	case *ast.AnchorNode:
		return `an anchor, which is not supported (quote a value that begins with "&")`
	case *ast.TagNode:
		return `a tag, which is not supported (quote a value that begins with "!")`
	default:
		return fmt.Sprintf("%q", v.GetToken().Value)
	}
}
