// SPDX-License-Identifier: Apache-2.0

package yamltree

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

// pair reads "A=B".
type pair struct{ a, b string }

func (p *pair) UnmarshalText(b []byte) error {
	var ok bool
	if p.a, p.b, ok = strings.Cut(string(b), "="); !ok {
		return fmt.Errorf("%q: want A=B", b)
	}
	return nil
}

func (p pair) String() string { return p.a + "=" + p.b }

// letters are those of texts.
type letters []string

func (l *letters) AppendFrom(s string) error {
	*l = append(*l, strings.Split(s, "")...)
	return nil
}

type entry struct {
	Name    string            `key:"name" is:"text" need:"no name"`
	Letters letters           `key:"letters" some:"want some" either:"x"`
	Labels  map[string]string `key:"labels" either:"x"`
}

func (e entry) Check() (string, error) {
	if e.Name == "bad" {
		return "name", errors.New("is bad")
	}
	if len(e.Letters) > 3 {
		return "", errors.New("too many letters")
	}
	return "", nil
}

type common struct {
	Wait time.Duration `key:"wait" flag:"wait" min:"1s" max:"1m" zero:"off" help:"how long"`
	Deny bool          `key:"action" words:"allow,deny"`
}

type file struct {
	Pairs []pair           `key:"pairs" flag:"pairs"`
	At    []netip.AddrPort `key:"at"`
	Inner struct {
		Count int     `key:"count" flag:"count" min:"1" max:"9"`
		Yes   bool    `key:"yes"`
		Odd   string  `key:"odd" is:"odd"`
		List  []entry `key:"list" list:"entries (\"- name: x\")"`
	} `key:"inner"`
	Part entry `key:"part" only:"name"`
	common
	Common common
	Free   any
}

var oddDecoder = Decoder{Checks: Checks{"odd": func(s string) (any, error) {
	if len(s)%2 == 0 {
		return nil, fmt.Errorf("%q: want an odd length", s)
	}
	return s, nil
}}}

func decode(t *testing.T, text string, d Decoder) (file, error) {
	t.Helper()
	n, err := Parse("f", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	var f file
	err = d.Decode(n, &f)
	return f, err
}

func TestDecode(t *testing.T) {
	found := map[string]string{}
	d := oddDecoder
	d.Found = func(key string, n Node) { found[key] = n.Where() }
	var extra []string
	d.Extra = map[string]func(Node) error{"inner.more": func(n Node) error { extra = append(extra, n.Where()); return nil }}
	f, err := decode(t, `
pairs: [a=b, c=d]
at: 127.0.0.1:80
wait: 30s
action: deny
part: {name: whole}
inner:
  count: 3
  yes: yes
  odd: abc
  more: [x]
  list:
  - {name: one, letters: [ab, c], labels: {k: v}}
  - name: two
`, d)
	var want file
	want.Pairs, want.At = []pair{{"a", "b"}, {"c", "d"}}, []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:80")}
	want.Common, want.Part.Name = common{30 * time.Second, true}, "whole"
	want.Inner.Count, want.Inner.Yes, want.Inner.Odd = 3, true, "abc"
	want.Inner.List = []entry{{"one", letters{"a", "b", "c"}, map[string]string{"k": "v"}}, {Name: "two"}}
	if err != nil || !reflect.DeepEqual(f, want) {
		t.Errorf("%+v, %v", f, err)
	}
	if found["inner.count"] != "f:8:10" || found["wait"] != "f:4:7" || !slices.Equal(extra, []string{"f:11:9"}) {
		t.Errorf("found %v, extra %v", found, extra)
	}
}

// All mistakes are reported, each with its place.
func TestDecodeReportsAllMistakes(t *testing.T) {
	for text, want := range map[string]string{
		"pairs: [a, b=c, d]\nwiat: 1s\naction: permit": `f:2:1: unknown key "wiat" (did you mean "wait"?)
f:1:9: pairs[0]: "a": want A=B
f:1:17: pairs[2]: "d": want A=B
f:3:9: action: "permit": want allow or deny`,
		"inner: {count: 10, yes: maybe, odd: ab}": `f:1:16: inner.count: "10": want a whole number from 1 to 9
f:1:25: inner.yes: "maybe": want true or false
f:1:37: inner.odd: "ab": want an odd length`,
		"wait: 2h":                 `f:1:7: wait: "2h": want a duration such as "150ms", 0 (off), or 1s to 1m0s`,
		"inner: {list: {name: x}}": `f:1:15: inner.list: want a list of entries ("- name: x")`,
		"inner: {list: [{}, {name: ' '}]}": `f:1:16: inner.list[0]: no name
f:1:27: inner.list[1].name: " ": want a text that is not empty`,
		"inner: {list: [{name: bad}, {name: x, letters: abcd}]}": `f:1:23: inner.list[0].name: is bad
f:1:29: inner.list[1]: too many letters`,
		"inner: {list: [{name: x, letters: [], labels: {a: [], b: {}}}]}": `f:1:35: inner.list[0].letters: an empty list: want some
f:1:51: inner.list[0].labels.a: a list: want one value
f:1:58: inner.list[0].labels.b: a mapping: want one value`,
		"part: {name: x, letters: a}":         `f:1:17: part: unknown key "letters": want name`,
		"inner: {list: [{name: x, more: 1}]}": `f:1:26: inner.list[0]: unknown key "more": want name, letters or labels`,
		"inner: 1":                            `f:1:8: inner: "1": want a mapping (key: value)`,
	} {
		d := oddDecoder
		d.Extra = map[string]func(Node) error{"inner.more": func(Node) error { return nil }}
		_, err := decode(t, text, d)
		if err == nil || err.Error() != want {
			t.Errorf("%s:\n got %v\nwant %s", text, err, want)
		}
	}
}

func TestDecodeOfLists(t *testing.T) {
	for text, want := range map[string]int{"": 0, "[]": 0, "- name: x\n- name: y": 2, "name: x": -1} {
		n, err := Parse("f", []byte(text))
		if err != nil {
			t.Fatal(err)
		}
		var list []entry
		if err := new(Decoder).Decode(n, &list, "entries"); (err != nil) != (want < 0) || err == nil && len(list) != want {
			t.Errorf("%q: %v, %v", text, list, err)
		}
	}
	var f file
	if err := Decode("f", []byte("# nothing\n"), &f); err != nil {
		t.Error(err)
	}
}

// The texts of a field are those that it reads.
func TestFields(t *testing.T) {
	f := file{Pairs: []pair{{"a", "b"}}, Common: common{Wait: time.Minute}}
	var got []string
	for _, one := range Fields(&f) {
		got = append(got, one.Key+"="+strings.Join(one.Texts(), ","))
	}
	if want := []string{"pairs=a=b", "at=", "inner.count=0", "inner.yes=false", "inner.odd=", "inner.list=", "part.name=", "part.letters=", "part.labels=map[]", "wait=1m0s", "action=false"}; !slices.Equal(got, want) {
		t.Errorf("got  %q\nwant %q", got, want)
	}
	if err := Fields(&f)[0].Set(nil); err != nil || len(f.Pairs) != 0 {
		t.Errorf("%v, %v", f.Pairs, err)
	}
}

func TestSchema(t *testing.T) {
	var f file
	f.Common.Wait = time.Minute
	b, err := json.Marshal(Schema(&f)["properties"])
	if err != nil {
		t.Fatal(err)
	}
	var got map[string]any
	if err := json.Unmarshal(b, &got); err != nil {
		t.Fatal(err)
	}
	for key, want := range map[string]string{
		"wait":   `{"default":"1m0s","description":"how long","pattern":"` + strings.ReplaceAll(durationPattern, `\`, `\\`) + `","type":["string","number"]}`,
		"action": `{"enum":["allow","deny"]}`,
		"part":   `{"additionalProperties":false,"properties":{"name":{"$ref":"#/$defs/text"}},"required":["name"],"type":"object"}`,
		"pairs":  `{"anyOf":[{"$ref":"#/$defs/text"},{"items":{"$ref":"#/$defs/text"},"type":"array"}]}`,
	} {
		if b, err := json.Marshal(got[key]); err != nil || string(b) != want {
			t.Errorf("%s: %s\nwant %s", key, b, want)
		}
	}
	if keys := slices.Sorted(maps.Keys(got)); !slices.Equal(keys, []string{"action", "at", "inner", "pairs", "part", "wait"}) {
		t.Errorf("%q", keys)
	}
}
