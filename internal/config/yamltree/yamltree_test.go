// SPDX-License-Identifier: Apache-2.0

package yamltree

import (
	"errors"
	"slices"
	"strings"
	"testing"
)

func TestPositions(t *testing.T) {
	root, err := Parse("f.yaml", []byte("# head\na:\n  b: [x, '+1']\n  c: |\n    two\n    lines\nd: 08\n"))
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	var walk func(Node)
	walk = func(n Node) {
		if entries, err := n.Map(); err == nil {
			for _, e := range entries {
				walk(e.Node)
			}
			return
		}
		for _, item := range n.List() {
			s, err := item.Text()
			if err != nil {
				t.Fatal(err)
			}
			got = append(got, item.Errorf("%q", s).Error())
		}
	}
	walk(root)
	want := []string{`f.yaml:3:7: a.b[0]: "x"`, `f.yaml:3:10: a.b[1]: "+1"`, `f.yaml:4:6: a.c: "two\nlines\n"`, `f.yaml:7:4: d: "08"`}
	if !slices.Equal(got, want) {
		t.Errorf("got  %q\nwant %q", got, want)
	}
}

func TestRefused(t *testing.T) {
	for _, tt := range []struct{ yaml, want string }{
		{"a: 1\na: 2", `f.yaml:2:1: mapping key "a" already defined at [1:1]`},
		{"a: *", `f.yaml:1:4: undefined alias name (quote a value that begins with "*")`},
		{"a: *b", `f.yaml:1:4: a: an alias, which is not supported (quote a value that begins with "*"): want one value`},
		{"a: &b c", `f.yaml:1:4: a: an anchor, which is not supported (quote a value that begins with "&"): want one value`},
		{"a: !!int 3", `f.yaml:1:4: a: a tag, which is not supported (quote a value that begins with "!"): want one value`},
		{"<<: {a: 1}", `f.yaml:1:1: merge keys (<<) are not supported: write the keys out`},
		{"a:\n", `f.yaml:1:1: a: no value: give one, or leave the key out`},
		{"a: {b: c}", `f.yaml:1:4: a: a mapping: want one value`},
		{"zzz: 1\nxxx: 1", "f.yaml:1:1: unknown key \"zzz\": want a\nf.yaml:2:1: unknown key \"xxx\""},
		{"b: 1", `f.yaml:1:1: unknown key "b" (did you mean "a"?)`},
		{"[a]", `f.yaml:1:1: a list: want a mapping (key: value)`},
		{"a: 'x", `f.yaml:1:4: a quoted text without its end: want the same quotation mark after it`},
		{"a: \"x", `f.yaml:1:4: a quoted text without its end: want the same quotation mark after it`},
		{"a:\n\t- b", `f.yaml:2:1: a tab at the beginning of a line: want spaces`},
		{"\ta: b", `f.yaml:1:2: a tab at the beginning of a line: want spaces`},
		{"a: b: c", `f.yaml:1:4: a mapping where a value began: quote a value that has ": " in it, or begin the mapping on a line of its own`},
		{"a: [b", `f.yaml:1:4: a list without its end: want "]"`},
		{"a: {b: c", `f.yaml:1:4: a mapping without its end: want "}"`},
		{"a: [b}", `f.yaml:1:4: a list without its end: want "]"`},
		{"a: 1\n- b", `f.yaml:2:1: a line that does not fit the lines before it: want the same indentation, and "key: value" or "- value" as there`},
		{"a: 1\nb", `f.yaml:2:1: a line that does not fit the lines before it: want the same indentation, and "key: value" or "- value" as there`},
		{"a: 1\n  b: 2", `f.yaml:1:4: a mapping where a value began: quote a value that has ": " in it, or begin the mapping on a line of its own`},
		{strings.Repeat("[", MaxSize), `f.yaml:1:101: lists and mappings are nested more than 100 deep`},
		{strings.Repeat("{a: ", MaxSize/4), `f.yaml:1:401: lists and mappings are nested more than 100 deep`},
		{strings.Repeat("- ", MaxSize/2), `f.yaml:1:201: lists and mappings are nested more than 100 deep`},
		{strings.Repeat("#", MaxSize+1), `f.yaml: 262145 bytes: want at most 262144`},
	} {
		root, err := Parse("f.yaml", []byte(tt.yaml))
		if err == nil {
			var entries []Entry
			if entries, err = root.Map("a"); err == nil {
				_, err = entries[0].Text()
			}
		}
		if err == nil || err.Error() != tt.want {
			t.Errorf("%.20q:\n got %v\nwant %s", tt.yaml, err, tt.want)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add("a: {b: [c, 1, ~, *x]}\n<<: {}\n? [d]\n: e\n")
	f.Add("- |\n x\n- >-\n y\n- !!t &a z\n")
	f.Fuzz(func(t *testing.T, yaml string) {
		if len(yaml) > 4096 {
			return
		}
		root, err := Parse("f", []byte(yaml))
		if err != nil {
			if _, ok := errors.AsType[*Error](err); !ok || strings.Contains(err.Error(), "\n") {
				t.Fatalf("%q", err)
			}
			return
		}
		var walk func(Node)
		walk = func(n Node) {
			if entries, err := n.Map(); err == nil {
				for _, e := range entries {
					walk(e.Node)
				}
			} else if n.IsList() {
				for _, item := range n.List() {
					walk(item)
				}
			} else if _, err := n.Text(); err != nil && strings.Contains(err.Error(), "\n") {
				t.Fatalf("%q", err)
			}
		}
		walk(root)
	})
}

// Editors of Windows put a byte order mark at the beginning of a file: it is no part of the
// first key, and positions remain those that editors show.
func TestByteOrderMark(t *testing.T) {
	n, err := Parse("f.yaml", []byte(ByteOrderMark+"a: 1\r\nb: 2\r\n"))
	if err != nil {
		t.Fatal(err)
	}
	entries, err := n.Map("a", "zzz")
	if want := "f.yaml:2:1: unknown key \"b\" (did you mean \"a\"?)"; err == nil || err.Error() != want || len(entries) != 1 || entries[0].Where() != "f.yaml:1:4" {
		t.Errorf("%+v, %v, want %s", entries, err, want)
	}
	for _, text := range []string{ByteOrderMark, ByteOrderMark + "# nothing\n"} {
		if n, err := Parse("f.yaml", []byte(text)); err != nil || !n.IsNull() {
			t.Errorf("%q: %v", text, err)
		}
	}
}

// Lines are counted as editors do, whatever ends them.
func TestLinesThatEndWithCRLF(t *testing.T) {
	n, err := Parse("f.yaml", []byte("# head\r\n\r\na: 1 # one\r\n# two\r\nb: |\r\n  x\r\n  y\r\nc: 3\r\n"))
	if err != nil {
		t.Fatal(err)
	}
	entries, err := n.Map("a", "b", "c")
	if err != nil || entries[0].line != 3 || entries[1].line != 5 || entries[2].line != 8 {
		t.Errorf("%+v, %v", entries, err)
	}
	if s, err := entries[1].Text(); err != nil || s != "x\ny\n" {
		t.Errorf("%q, %v", s, err)
	}
}

// What PowerShell 5.1 writes with > is refused as what it is.
func TestUTF16(t *testing.T) {
	const want = "f.yaml: UTF-16 text: want UTF-8"
	for _, text := range []string{"\xff\xfea\x00:\x00", "\xfe\xff\x00a\x00:", "a\x00:\x00 \x001\x00", "\x00a\x00:", "\xff\xfe"} {
		if _, err := Parse("f.yaml", []byte(text)); err == nil || !strings.HasPrefix(err.Error(), want) || !strings.Contains(err.Error(), "utf8") {
			t.Errorf("%q: %v", text, err)
		}
	}
}
