// SPDX-License-Identifier: Apache-2.0

package forwards

import (
	"cmp"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/fairlead/fairlead/internal/rules"
	"github.com/fairlead/fairlead/internal/yamltree"
)

// header begins a new file.
const header = `# Rules that "fairlead forward", "deny" and "allow" wrote. They are evaluated after those of
# the configuration, for what these do not deny. This file may be edited while fairlead runs.
`

// document is a file of rules. Edits change single lines of its text, so that comments and
// rules that were written by hand remain as they are.
type document struct {
	path  string
	text  string
	rules []rules.Rule
	lines []int // on which each rule begins, from 0
}

// Parse reads a file of rules; path names it in errors.
func Parse(path string, data []byte) ([]rules.Rule, error) {
	d, err := parse(path, string(data))
	return d.rules, err
}

// parse reads a file without its byte order mark, which the next edit leaves out.
func parse(path, text string) (document, error) {
	text = strings.TrimPrefix(text, yamltree.ByteOrderMark)
	d := document{path: path, text: text}
	root, err := yamltree.Parse(path, []byte(text))
	if err != nil || root.IsNull() {
		return d, err
	}
	entries, err := root.Map("rules")
	if err != nil {
		return d, err
	}
	for _, e := range entries { // there is but one
		if d.rules, err = rules.ParseList(e.Node); err != nil {
			return d, err
		}
		if e.IsList() {
			for _, n := range e.List() {
				d.lines = append(d.lines, n.Line()-1)
			}
		}
	}
	return d, nil
}

// index returns the position of the rule with a name, or -1.
func (d document) index(name string) int {
	return slices.IndexFunc(d.rules, func(r rules.Rule) bool { return r.Name == name })
}

// made returns the position of the rule of a kind that a request made, or -1. One that was
// written by hand may have its name, and is about other ports.
func (d document) made(q Request, k kind, now time.Time) int {
	want, err := parseBlock(q.block(k, now))
	return slices.IndexFunc(d.rules, func(r rules.Rule) bool {
		return err == nil && r.Name == want.Name && r.Deny == want.Deny && r.Exposes() == want.Exposes() && reflect.DeepEqual(r.Match, want.Match)
	})
}

// inEffect names the rules that is is true of, for an error about one that is not there.
func (d document) inEffect(is func(rules.Rule) bool) string {
	var names []string
	for i, r := range d.rules {
		if is(r) {
			names = append(names, fmt.Sprintf("%q", cmp.Or(r.Name, fmt.Sprintf("rule %d", i+1))))
		}
	}
	if len(names) == 0 {
		return ""
	}
	return "; in effect: " + strings.Join(names, ", ")
}

// denies reports whether a rule is one that Deny makes.
func denies(r rules.Rule) bool {
	n, ok := rank(r)
	return ok && n == 0
}

func equal(a, b rules.Rule) bool { return reflect.DeepEqual(a, b) }

// add inserts the rule of a block at its place by rank. It refuses one that would have no
// effect, or that has the host port of another.
func (d document) add(block string, permitted permit) (document, error) {
	r, err := parseBlock(block)
	if err != nil {
		return d, err
	}
	if !r.Deny {
		if err := permitted(r.Match, r.HostAddress); err != nil {
			return d, err
		}
		for _, o := range d.rules {
			// A rule with onConflict next or any takes another port. Any other would never be open.
			if !r.OnConflict.Moves() && collide(r, o) {
				return d, fmt.Errorf("host port %d is taken by %q: choose another one with --to, or remove that", hostPort(r), o.Name)
			}
		}
	}
	mine, _ := rank(r)
	at := slices.IndexFunc(d.rules, func(o rules.Rule) bool { n, ok := rank(o); return ok && n > mine })
	if at < 0 {
		at = len(d.rules)
	}
	return d.insert(at, r, block)
}

// parseBlock reads the rule of a block.
func parseBlock(block string) (rules.Rule, error) {
	d, err := parse("request", "rules:\n"+block+"\n")
	if err != nil {
		return rules.Rule{}, err
	}
	return d.rules[0], nil
}

// hostPort returns the one host port that a rule names, or 0.
func hostPort(r rules.Rule) uint16 {
	if r.Deny || r.Exposes() || len(r.Match.Ports) != 1 || r.Match.Ports[0].First != r.Match.Ports[0].Last {
		return 0
	}
	n, _ := r.HostPort.Of(r.Match.Ports[0].First)
	return n
}

// collide reports whether two rules want one host port for different ports, or for the
// port of different guests.
func collide(a, b rules.Rule) bool {
	n := hostPort(a)
	if n == 0 || n != hostPort(b) || a.Match.Protocol != b.Match.Protocol && b.Match.Protocol != 0 {
		return false
	}
	if a.Match.Ports[0] == b.Match.Ports[0] && a.Match.Demand == b.Match.Demand && (a.Match.Guest == b.Match.Guest || a.Match.Guest == "" || b.Match.Guest == "") {
		return false // one of them decides
	}
	return a.HostAddress.Overlaps(b.HostAddress)
}

// end returns the line behind the last one of rule i. Comments behind it belong to the next.
func (d document) end(lines []string, i int) int {
	end := len(lines)
	if i+1 < len(d.lines) {
		end = d.lines[i+1]
	}
	for end > d.lines[i]+1 {
		if s := strings.TrimSpace(lines[end-1]); s != "" && !strings.HasPrefix(s, "#") {
			break
		}
		end--
	}
	return end
}

// split returns the lines of a text. It refuses the other line breaks of YAML 1.1 (section
// 4.2): the parser counts them, so a rule's line would be another one here.
func (d document) split(text string) ([]string, error) {
	if strings.ContainsAny(strings.ReplaceAll(text, "\r\n", "\n"), "\r\u0085\u2028\u2029") {
		return nil, fmt.Errorf("%s has line breaks other than LF and CRLF: replace them, or edit it by hand", d.path)
	}
	return strings.Split(text, "\n"), nil
}

// without removes rule i.
func (d document) without(i int) (document, error) {
	lines, err := d.split(d.text)
	if err != nil {
		return d, err
	}
	lines = slices.Delete(lines, d.lines[i], d.end(lines, i))
	return d.edited(lines, slices.Delete(slices.Clone(d.rules), i, i+1))
}

// InEffect returns those of a list of rules that count at a time.
func InEffect(list []rules.Rule, now time.Time) []rules.Rule {
	return slices.DeleteFunc(slices.Clone(list), func(r rules.Rule) bool { return !r.InEffect(now) })
}

// withoutEnded removes the rules that do not count any more, and returns their names.
func (d document) withoutEnded(counts func(rules.Rule) bool) (_ document, ended []string, err error) {
	for i := len(d.rules) - 1; i >= 0 && err == nil; i-- {
		if r := d.rules[i]; !counts(r) {
			ended = append(ended, r.Name)
			d, err = d.without(i)
		}
	}
	return d, ended, err
}

// insert puts a rule at position i.
func (d document) insert(i int, r rules.Rule, block string) (document, error) {
	text := d.text
	if strings.TrimSpace(text) == "" {
		text = header
	}
	lines, err := d.split(strings.TrimRight(text, "\n\r"))
	if err != nil {
		return d, err
	}
	key := slices.IndexFunc(lines, func(s string) bool { return strings.HasPrefix(s, "rules:") })
	switch {
	case key < 0:
		lines, key = append(lines, "rules:"), len(lines)
	case len(d.rules) == 0:
		lines[key] = "rules:" // perhaps with an empty list
	}
	at, indent := key+1, "  "
	if len(d.rules) > 0 {
		first := lines[d.lines[0]]
		indent = first[:len(first)-len(strings.TrimLeft(first, " "))]
	}
	if i > 0 {
		at = d.end(lines, i-1)
	}
	var add []string
	for line := range strings.SplitSeq(block, "\n") {
		add = append(add, indent+line)
	}
	return d.edited(append(slices.Insert(lines, at, add...), ""), slices.Insert(slices.Clone(d.rules), i, r))
}

// edited parses the text after an edit. It is refused if it does not have the rules that
// are wanted, because the file has another form than ours.
func (d document) edited(lines []string, want []rules.Rule) (document, error) {
	text := strings.Join(lines, "\n")
	if len(text) > yamltree.MaxSize {
		return d, fmt.Errorf("%s would have %d bytes, and may have %d: remove rules or comments, for example by `fairlead forward rm`", d.path, len(text), yamltree.MaxSize)
	}
	next, err := parse(d.path, text)
	if err != nil || !slices.EqualFunc(next.rules, want, equal) {
		return d, fmt.Errorf("%s was edited by hand into a form that cannot be changed without loss: edit it by hand, or begin each rule on a line of its own with %q", d.path, "- ")
	}
	return next, nil
}
