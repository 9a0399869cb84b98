// SPDX-License-Identifier: Apache-2.0

package yamltree

import (
	"cmp"
	"encoding"
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/fairlead/fairlead/internal/config/words"
)

// Field is a key of a mapping, which a field of a struct has. Its tags describe it:
//
//	key     the key; an inner struct without one has its keys beside those of the outer struct
//	is      the name of a check that reads the text; "text" is any that is not empty
//	words   all words that it may be, separated by commas; of a bool that for false, and that for true
//	or      a regular expression of what it may be beside the words, which its own type then checks
//	min     the smallest number or duration
//	max     the largest one
//	zero    a zero duration below min is allowed, and means this
//	list    what a list is of, with an example: one value alone is then no list
//	some    why a list may not be empty
//	need    why the key may not be left out
//	only    the keys that count of an inner struct, separated by commas
//	help    what it means
//
// [Schema] reads some more.
type Field struct {
	Key   string // with those of outer mappings: "limits.flows"
	Tag   reflect.StructTag
	Value reflect.Value
}

// keys returns the keys of one mapping.
func keys(v reflect.Value, prefix string) (list []Field) {
	for f, value := range v.Fields() {
		switch key := f.Tag.Get("key"); {
		case key != "":
			list = append(list, Field{prefix + key, f.Tag, value})
		case f.IsExported() && value.Kind() == reflect.Struct:
			list = append(list, keys(value, prefix)...)
		}
	}
	return list
}

// Fields returns the keys of a struct and its inner structs that are one value, or a list of values,
// in their order. To points at the struct.
func Fields(to any) (list []Field) {
	for _, f := range keys(reflect.ValueOf(to).Elem(), "") {
		list = append(list, f.leaves()...)
	}
	return list
}

func (f Field) leaves() (list []Field) {
	if !f.isMapping() {
		return []Field{f}
	}
	for _, inner := range keys(f.Value, f.Key+".") {
		list = append(list, inner.leaves()...)
	}
	return list
}

// isMapping reports whether the value is a mapping with keys of its own.
func (f Field) isMapping() bool {
	_, is := f.Value.Addr().Interface().(encoding.TextUnmarshaler)
	return f.Value.Kind() == reflect.Struct && !is && f.Tag.Get("is") == ""
}

func (f Field) only() []string {
	if s := f.Tag.Get("only"); s != "" {
		return strings.Split(s, ",")
	}
	return nil
}

// Words returns the words that the field may be, as words or enum has them.
func (f Field) Words() []string {
	if s := cmp.Or(f.Tag.Get("words"), f.Tag.Get("enum")); s != "" {
		return strings.Split(s, ",")
	}
	return nil
}

// Texts is a list of which one text may be several values.
type Texts interface{ AppendFrom(text string) error }

// Checked is a struct that says what no field shows alone: by the key of the wrong one, or "" for
// the whole.
type Checked interface {
	Check() (key string, err error)
}

// Checks read texts, each by the name that the tag "is" has.
type Checks map[string]func(string) (any, error)

// Decoder fills structs. Its zero value does.
type Decoder struct {
	Checks Checks
	Extra  map[string]func(Node) error // keys that are no fields, as in Field.Key
	Found  func(key string, n Node)    // is told of each value, unless it is nil
}

// Decode reads a document into the struct that to points at. See [Decoder.Decode].
func Decode(file string, data []byte, to any) error {
	n, err := Parse(file, data)
	if err != nil || n.IsNull() {
		return err
	}
	return new(Decoder).Decode(n, to)
}

// Decode reads a node into what to points at: a struct, whose tags are as in [Field], or a list of
// structs, which may be null. Only are the keys that a struct may have, all if none is given, or what
// a list is of, with an example. Keys that are absent leave their fields as they are. The error joins
// all mistakes, each a *[Error]; then to is useless.
func (d *Decoder) Decode(n Node, to any, only ...string) error {
	v := reflect.ValueOf(to).Elem()
	if v.Kind() == reflect.Struct {
		return d.mapping(n, v, "", only)
	}
	return d.value(n, Field{Tag: reflect.StructTag("list:" + strconv.Quote(strings.Join(only, ","))), Value: v})
}

// mapping reads the keys of a struct.
func (d *Decoder) mapping(n Node, v reflect.Value, prefix string, only []string) error {
	fields := keys(v, prefix)
	if len(only) > 0 {
		fields = slices.DeleteFunc(fields, func(f Field) bool { return !slices.Contains(only, strings.TrimPrefix(f.Key, prefix)) })
	}
	var known []string
	for _, f := range fields {
		known = append(known, strings.TrimPrefix(f.Key, prefix))
	}
	for key := range d.Extra {
		if rest, ok := strings.CutPrefix(key, prefix); ok && !strings.Contains(rest, ".") {
			known = append(known, rest)
		}
	}
	slices.Sort(known[len(fields):])
	entries, err := n.Map(known...)
	errs := []error{err}
	at := make(map[string]Node)
	for _, e := range entries {
		at[e.Key] = e.Node
		if extra := d.Extra[prefix+e.Key]; extra != nil {
			errs = append(errs, extra(e.Node))
			continue
		}
		f := fields[slices.IndexFunc(fields, func(f Field) bool { return f.Key == prefix+e.Key })]
		errs = append(errs, d.value(e.Node, f))
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	for i, f := range fields {
		if _, ok := at[known[i]]; !ok && f.Tag.Get("need") != "" {
			errs = append(errs, n.Errorf("%s", f.Tag.Get("need")))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	if c, ok := v.Addr().Interface().(Checked); ok {
		if key, err := c.Check(); err != nil {
			if wrong, ok := at[key]; ok {
				n = wrong
			}
			return n.Errorf("%v", err)
		}
	}
	return nil
}

// value reads the value of one key.
func (d *Decoder) value(n Node, f Field) error {
	if d.Found != nil && !f.isMapping() {
		d.Found(f.Key, n)
	}
	switch {
	case f.isMapping():
		return d.mapping(n, f.Value, f.Key+".", f.only())
	case f.Value.Kind() == reflect.Map:
		return textMap(n, f.Value)
	case f.Value.Kind() == reflect.Slice:
		return d.list(n, f)
	}
	_, err := d.scalar(n, f)
	return err
}

func (d *Decoder) list(n Node, f Field) error {
	want := f.Tag.Get("list")
	if want != "" && n.IsNull() { // all items are commented out
		return nil
	}
	if want != "" && !n.IsList() {
		return n.Errorf("want a list of %s", want)
	}
	items := n.List()
	if why := f.Tag.Get("some"); len(items) == 0 && why != "" {
		return n.Errorf("an empty list: %s", why)
	}
	if _, is := f.Value.Addr().Interface().(Texts); !is && f.Tag.Get("is") == "" && f.Value.Type().Elem().Kind() == reflect.Struct {
		all := reflect.MakeSlice(f.Value.Type(), len(items), len(items))
		if one := (Field{Value: reflect.New(f.Value.Type().Elem()).Elem()}); one.isMapping() {
			var errs []error
			for i, item := range items {
				errs = append(errs, d.mapping(item, all.Index(i), f.Key+"[].", nil))
			}
			f.Value.Set(all)
			return errors.Join(errs...)
		}
	}
	var texts []string
	var errs []error
	for _, item := range items {
		s, err := d.scalar(item, f) // one by one, to say which it is
		texts, errs = append(texts, s), append(errs, err)
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	return f.Set(d.Checks, texts...)
}

// scalar reads one text, and returns it.
func (d *Decoder) scalar(n Node, f Field) (string, error) {
	s, err := n.Text()
	if err != nil {
		return "", err
	}
	if err := f.Set(d.Checks, s); err != nil {
		return "", n.Errorf("%v", err)
	}
	return s, nil
}

func textMap(n Node, v reflect.Value) error {
	entries, err := n.Map()
	errs := []error{err}
	texts := make(map[string]string, len(entries))
	for _, e := range entries {
		texts[e.Key], err = e.Text()
		errs = append(errs, err)
	}
	v.Set(reflect.ValueOf(texts))
	return errors.Join(errs...)
}

// IsList reports whether the field may have several values.
func (f Field) IsList() bool { return f.Value.Kind() == reflect.Slice }

// Set gives the field the value of one text, or a list the values of all texts. The error has the
// text and what is allowed.
func (f Field) Set(checks Checks, texts ...string) error {
	if !f.IsList() {
		return f.parse(checks, texts[0], f.Value)
	}
	all := reflect.New(f.Value.Type())
	if several, ok := all.Interface().(Texts); ok {
		for _, s := range texts {
			if err := several.AppendFrom(s); err != nil {
				return err
			}
		}
		f.Value.Set(all.Elem())
		return nil
	}
	all.Elem().Set(reflect.MakeSlice(f.Value.Type(), len(texts), len(texts)))
	for i, s := range texts {
		if err := f.parse(checks, s, all.Elem().Index(i)); err != nil {
			return err
		}
	}
	f.Value.Set(all.Elem())
	return nil
}

// parse reads one text.
func (f Field) parse(checks Checks, s string, to reflect.Value) error {
	if f.Tag.Get("words") != "" && f.Tag.Get("or") == "" {
		if err := words.Check(s, f.Words()...); err != nil {
			return err
		}
	}
	switch is := f.Tag.Get("is"); {
	case is == "text":
		if strings.TrimSpace(s) == "" {
			return fmt.Errorf("%q: want a text that is not empty", s)
		}
	case is != "":
		v, err := checks[is](s)
		if err == nil {
			to.Set(reflect.ValueOf(v).Convert(to.Type()))
		}
		return err
	}
	if t, ok := to.Addr().Interface().(encoding.TextUnmarshaler); ok {
		return t.UnmarshalText([]byte(s))
	}
	if to.Type() == reflect.TypeFor[time.Duration]() {
		v, err := f.duration(s)
		to.SetInt(int64(v))
		return err
	}
	switch to.Kind() {
	case reflect.String:
		to.SetString(s)
	case reflect.Bool:
		v, err := f.truth(s)
		to.SetBool(v)
		return err
	case reflect.Int:
		v, err := f.whole(s)
		to.SetInt(int64(v))
		return err
	case reflect.Uint32:
		v, err := f.whole(s)
		to.SetUint(v)
		return err
	default:
		panic("no way to read a " + to.Type().String()) // a mistake in a declaration
	}
	return nil
}

func (f Field) truth(s string) (bool, error) {
	if list := f.Words(); list != nil {
		return s == list[1], nil
	}
	switch s {
	case "true", "yes":
		return true, nil
	case "false", "no":
		return false, nil
	}
	return false, fmt.Errorf("%q: want true or false", s)
}

// whole reads a whole number.
func (f Field) whole(s string) (uint64, error) {
	lo, errLo := strconv.ParseUint(f.Tag.Get("min"), 10, 64)
	hi, errHi := strconv.ParseUint(f.Tag.Get("max"), 10, 64)
	if err := errors.Join(errLo, errHi); err != nil {
		panic(err) // a mistake in a declaration
	}
	n, err := strconv.ParseUint(s, 10, 64)
	if err != nil || n < lo || n > hi {
		return 0, fmt.Errorf("%q: want a whole number from %d to %d", s, lo, hi)
	}
	return n, nil
}

func (f Field) duration(s string) (time.Duration, error) {
	lo, errLo := time.ParseDuration(f.Tag.Get("min"))
	hi, errHi := time.ParseDuration(f.Tag.Get("max"))
	if err := errors.Join(errLo, errHi); err != nil {
		panic(err) // a mistake in a declaration
	}
	zero := f.Tag.Get("zero")
	d, err := time.ParseDuration(s)
	if err == nil && (d >= lo && d <= hi || zero != "" && d == 0) {
		return d, nil
	}
	want := fmt.Sprintf("%s to %s", lo, hi)
	if zero != "" {
		want = fmt.Sprintf("0 (%s), or %s", zero, want)
	}
	return 0, fmt.Errorf(`%q: want a duration such as "150ms", %s`, s, want)
}

// Texts returns the value as texts that Set reads; none of an empty list.
func (f Field) Texts() (list []string) {
	if !f.IsList() {
		return []string{textOf(f.Value)}
	}
	for i := range f.Value.Len() {
		list = append(list, textOf(f.Value.Index(i)))
	}
	return list
}

func textOf(v reflect.Value) string {
	if level, ok := v.Interface().(slog.Level); ok {
		return strings.ToLower(level.String())
	}
	return fmt.Sprint(v.Interface())
}
