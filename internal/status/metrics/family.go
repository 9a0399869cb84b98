// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

const namespace = "fairlead"

// Family is one metric family.
type Family struct {
	Name, Help string
	Kind       string // "counter", "gauge" or "histogram"
	Labels     []Label

	desc *prometheus.Desc
}

// Label is a label with a human-readable list of its values.
type Label struct{ Name, Values string }

// Families returns what [Handler] exports of S, in the order of its fields, and panics
// if the tags are wrong. The tags of a field are:
//
//   - metric: the name without "fairlead_". It ends in "_total" if the field is a
//     counter. "*" stands for all metrics of the field's own type.
//   - help: what the metric means, at the first field that has its name.
//   - label: "NAME=VALUE" and what the value means, if its name does not say it.
//     A map's keys are values of a label: they are listed with "; " between them,
//     or described by "NAME: TEXT". Without either they are the values of the
//     family before that has the label. A string with no metric is the value for
//     all fields of its struct that follow.
//   - value: the same for the strings of a map, which are values of a second label.
//
// Fields are numbers, durations (in seconds), truths (1 or 0), maps of these, and
// pointers to these, which are not sent while they are nil. A Propagation declares itself.
func Families[S any]() []*Family {
	families, _ := compile(reflect.TypeFor[exported[S]]())
	return families
}

// step sends the metrics of a value, with the values of the labels above it.
type step func(to chan<- prometheus.Metric, v reflect.Value, labels []string)

// compiler reads tags once, so that a scrape only follows fields.
type compiler struct {
	families []*Family
	values   map[string]string // of each label, as they were listed last
}

func compile(t reflect.Type) ([]*Family, step) {
	c := compiler{values: make(map[string]string)}
	send := c.fields(t, nil)
	for _, f := range c.families {
		names := make([]string, len(f.Labels))
		for i, l := range f.Labels {
			names[i] = l.Name
		}
		f.desc = prometheus.NewDesc(f.Name, f.Help, names, nil)
	}
	return c.families, send
}

// fields compiles a struct.
func (c *compiler) fields(t reflect.Type, above []Label) step {
	labels, key := slices.Clip(above), -1
	sends := make([]step, t.NumField())
	for i := range sends {
		f := t.Field(i)
		switch name, label := f.Tag.Get("metric"), f.Tag.Get("label"); {
		case name != "":
			sends[i] = c.value(f.Type, f.Tag, labels)
		case label != "":
			labels, key = append(labels, c.label(label)), i
		}
	}
	return func(to chan<- prometheus.Metric, v reflect.Value, labels []string) {
		if key >= 0 {
			labels = append(slices.Clip(labels), v.Field(key).String())
		}
		for i, send := range sends {
			if send != nil {
				send(to, v.Field(i), labels)
			}
		}
	}
}

// value compiles what a field holds.
func (c *compiler) value(t reflect.Type, tag reflect.StructTag, labels []Label) step {
	if t == reflect.TypeFor[*Propagation]() {
		return c.propagation()
	}
	switch t.Kind() {
	case reflect.Struct:
		return c.fields(t, labels)
	case reflect.Pointer:
		send := c.value(t.Elem(), tag, labels)
		return func(to chan<- prometheus.Metric, v reflect.Value, labels []string) {
			if !v.IsNil() {
				send(to, v.Elem(), labels)
			}
		}
	case reflect.Slice:
		send := c.value(t.Elem(), tag, labels)
		return func(to chan<- prometheus.Metric, v reflect.Value, labels []string) {
			for i := range v.Len() {
				send(to, v.Index(i), labels)
			}
		}
	case reflect.Map:
		send := c.number(t.Elem(), tag, append(slices.Clip(labels), c.label(tag.Get("label"))))
		return func(to chan<- prometheus.Metric, v reflect.Value, labels []string) {
			for i := v.MapRange(); i.Next(); {
				send(to, i.Value(), append(slices.Clip(labels), fmt.Sprint(i.Key())))
			}
		}
	}
	label := tag.Get("label")
	if label == "" {
		return c.number(t, tag, labels)
	}
	name, text, _ := strings.Cut(label, "=")
	send := c.number(t, tag, append(slices.Clip(labels), Label{name, quote(text)}))
	fixed := text[:wordEnd(text)]
	return func(to chan<- prometheus.Metric, v reflect.Value, labels []string) {
		send(to, v, append(slices.Clip(labels), fixed))
	}
}

// number compiles a number, or a string that is the value of a label.
func (c *compiler) number(t reflect.Type, tag reflect.StructTag, labels []Label) step {
	named := t.Kind() == reflect.String
	if named {
		labels = append(slices.Clip(labels), c.label(tag.Get("value")))
	}
	sample(reflect.Zero(t)) // panics if it is no number
	f := c.family(tag.Get("metric"), tag.Get("help"), labels)
	kind := prometheus.GaugeValue
	if f.Kind == "counter" {
		kind = prometheus.CounterValue
	}
	return func(to chan<- prometheus.Metric, v reflect.Value, labels []string) {
		if named {
			labels = append(slices.Clip(labels), v.String())
		}
		to <- prometheus.MustNewConstMetric(f.desc, kind, sample(v), labels...)
	}
}

// sample returns the number in v.
func sample(v reflect.Value) float64 {
	switch {
	case v.Kind() == reflect.String, v.Kind() == reflect.Bool && v.Bool():
		return 1
	case v.Kind() == reflect.Bool:
		return 0
	case v.Type() == reflect.TypeFor[time.Duration]():
		return time.Duration(v.Int()).Seconds()
	case v.CanInt():
		return float64(v.Int())
	case v.CanUint():
		return float64(v.Uint())
	}
	return v.Float()
}

// propagation compiles the histogram, which declares itself.
func (c *compiler) propagation() step {
	f := c.family(propagationName, propagationHelp, []Label{c.label("sink=hostlink; listener; gvproxy; vtunnel; none")})
	f.Kind = "histogram"
	return func(to chan<- prometheus.Metric, v reflect.Value, _ []string) {
		v.Interface().(*Propagation).times.Collect(to)
	}
}

// family returns the family of a name. Another field of the same family adds the
// values of its labels.
func (c *compiler) family(name, help string, labels []Label) *Family {
	name = prometheus.BuildFQName(namespace, "", name)
	i := slices.IndexFunc(c.families, func(f *Family) bool { return f.Name == name })
	if i < 0 {
		if help == "" {
			panic("metrics: " + name + " has no help")
		}
		kind := "gauge"
		if strings.HasSuffix(name, "_total") {
			kind = "counter"
		}
		f := &Family{Name: name, Help: help, Kind: kind, Labels: slices.Clone(labels)}
		c.families = append(c.families, f)
		return f
	}
	f := c.families[i]
	for i, l := range labels {
		if f.Labels[i] != l {
			f.Labels[i].Values += ", " + l.Values
		}
	}
	return f
}

// label reads a label and the list of its values.
func (c *compiler) label(tag string) Label {
	if name, values, listed := strings.Cut(tag, "="); listed {
		c.values[name] = quote(values)
		return Label{name, c.values[name]}
	}
	name, text, described := strings.Cut(tag, ": ")
	if !described {
		text = c.values[name]
	}
	return Label{name, text}
}

// quote marks the values in a list, the first word of each item.
func quote(list string) string {
	separator := ", "
	if strings.Contains(list, separator) {
		separator = "; "
	}
	items := strings.Split(list, "; ")
	for i, item := range items {
		n := wordEnd(item)
		items[i] = "`" + item[:n] + "`" + item[n:]
	}
	return strings.Join(items, separator)
}

// wordEnd is the length of the first word.
func wordEnd(s string) int {
	if i := strings.IndexAny(s, " :"); i >= 0 {
		return i
	}
	return len(s)
}
