// SPDX-License-Identifier: Apache-2.0

package forwards

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/fairlead/fairlead/internal/config/rules"
)

// Entry is a request that is kept.
type Entry struct {
	Request
	Until time.Time `json:"until,omitzero"` // of Expose: its end, in UTC
}

// Rule returns the rule that the request makes.
func (e Entry) Rule() rules.Rule {
	r := rules.Rule{
		Kind: kept[e.Op], Name: e.target(), Match: e.Match(), Deny: e.Op == Deny, HostAddress: e.HostAddress(), Until: e.Until,
	}
	if e.To != 0 {
		r.HostPort = rules.FixedPort(e.To)
	}
	if e.OnConflict != "" {
		r.OnConflict, _ = rules.ParseOnConflict(e.OnConflict) // it was checked
	}
	return r
}

// Rules returns the rules that requests make, in the order of the requests.
func Rules(list []Entry) []rules.Rule {
	made := make([]rules.Rule, len(list))
	for i, e := range list {
		made[i] = e.Rule()
	}
	return made
}

// InEffect reports whether the request counts at a time. What exposes does not after its end; nor
// if its end is too far away, because then the clock is wrong.
func (e Entry) InEffect(now time.Time) bool {
	left := e.Until.Sub(now.Round(0)) // by the wall clock: the system may have been suspended
	return e.Op != Expose || left > 0 && left <= rules.MaxExposure
}

// InEffect returns the requests of a list that count at a time.
func InEffect(list []Entry, now time.Time) []Entry {
	return slices.DeleteFunc(slices.Clone(list), func(e Entry) bool { return !e.InEffect(now) })
}

// MaxSize is the size of the largest file of requests, in bytes.
const MaxSize = 256 << 10

// Parse reads a file of requests; path names it in errors. An empty one has none. Guests says that
// it is a host's. A file is refused whole if writing its requests again would lose a part of it.
func Parse(path string, data []byte, guests bool) ([]Entry, error) {
	if len(data) == 0 {
		return nil, nil
	}
	list, err := parse(data, guests)
	if err != nil {
		return nil, fmt.Errorf("%s: %w: mend the file or remove it", path, err)
	}
	return list, nil
}

func parse(data []byte, guests bool) ([]Entry, error) {
	if len(data) > MaxSize {
		return nil, fmt.Errorf("%d bytes: want at most %d", len(data), MaxSize)
	}
	var file struct {
		Requests []json.RawMessage `json:"requests"`
	}
	if err := strictly(data, &file); err != nil {
		return nil, err
	}
	list := make([]Entry, len(file.Requests))
	for i, text := range file.Requests {
		err := strictly(text, &list[i])
		list[i].Until = list[i].Until.UTC()
		if err == nil {
			err = list[i].check(guests)
		}
		if err != nil {
			return nil, fmt.Errorf("requests[%d]: %w", i, err)
		}
	}
	var given, again bytes.Buffer
	if err := errors.Join(json.Compact(&given, data), json.Compact(&again, format(list))); err != nil {
		return nil, err
	}
	if !bytes.Equal(given.Bytes(), again.Bytes()) {
		return nil, errors.New("a key is there twice, or something is not in the form in which fairlead writes it")
	}
	slices.SortStableFunc(list, compare)
	for i := range list[:max(0, len(list)-1)] {
		if compare(list[i], list[i+1]) == 0 {
			return nil, fmt.Errorf("%q is there twice", list[i])
		}
	}
	return list, nil
}

// strictly reads one JSON value, without unknown keys and with nothing behind it.
func strictly(data []byte, to any) error {
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	err := d.Decode(to)
	if _, more := d.Token(); err == nil && !errors.Is(more, io.EOF) {
		err = errors.New("there is something behind the end")
	}
	if syntax, ok := errors.AsType[*json.SyntaxError](err); ok {
		err = fmt.Errorf("line %d: %w", 1+bytes.Count(data[:min(int(syntax.Offset), len(data))], []byte("\n")), err)
	}
	if err != nil {
		return errors.New(strings.TrimPrefix(err.Error(), "json: "))
	}
	return nil
}

// check returns why a file may not have the request.
func (e Entry) check(guests bool) error {
	q, err := e.checked()
	switch {
	case err != nil:
		return err
	case kept[e.Op] == 0:
		return fmt.Errorf("%s: only undoes, and is not kept", e.Op)
	case q != e.Request:
		return fmt.Errorf("%s: want it as fairlead writes it: %q", e.Op, q)
	case e.Op == Allow && e.Port == 0:
		return fmt.Errorf("%s: want a port", e.Op)
	case (e.Op == Expose) == e.Until.IsZero():
		return fmt.Errorf("%s: an end is given for expose, and for nothing else", e.Op)
	}
	return e.checkSide(guests)
}

// format is the text of a file.
func format(list []Entry) []byte {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	// Nothing in this value can fail to encode.
	_ = e.Encode(map[string][]Entry{"requests": append([]Entry{}, list...)})
	return b.Bytes()
}

// Result is what a change did. It is empty if there was nothing to do.
type Result struct {
	Removed []Request `json:"removed"`
	Added   []Request `json:"added"`
	// Closed says, of what was to be allowed and was not added, why it is closed all the same.
	Closed string `json:"closed,omitempty"`
}

// edit is a list of requests that is being changed.
type edit struct {
	Result
	list []Entry // sorted
}

// find returns the place of a request of an operation for what q selects.
func (e *edit) find(q Request, op Op) (int, bool) {
	return slices.BinarySearchFunc(e.list, Entry{Request: q.as(op)}, compare)
}

func (e *edit) has(q Request, op Op) bool {
	_, ok := e.find(q, op)
	return ok
}

// remove removes the requests of these operations for what q selects, and reports whether there
// was one.
func (e *edit) remove(q Request, ops ...Op) (found bool) {
	for _, op := range ops {
		if i, ok := e.find(q, op); ok {
			e.Removed = append(e.Removed, e.list[i].Request)
			e.list, found = slices.Delete(e.list, i, i+1), true
		}
	}
	return found
}

// permit returns why a rule that allows would have no effect.
type permit func(m rules.Match, at rules.HostAddress) error

// add adds a request, with its end if it exposes. It refuses one that would have no effect, or that
// has the host port of another.
func (e *edit) add(q Request, now time.Time, permitted permit) error {
	one := Entry{Request: q}
	if q.Op == Expose {
		one.Until = now.Add(time.Duration(q.Seconds) * time.Second).UTC().Truncate(time.Second)
	}
	if q.Op != Deny {
		if err := permitted(q.Match(), q.HostAddress()); err != nil {
			return err
		}
		for _, o := range e.list {
			if collide(q, o.Request) {
				return fmt.Errorf("host port %d is taken by %q: choose another one with --to, or remove that", q.hostPort(), o)
			}
		}
	}
	i, _ := slices.BinarySearchFunc(e.list, one, compare)
	e.list, e.Added = slices.Insert(e.list, i, one), append(e.Added, q)
	return nil
}

// hostPort returns the one host port that a request names, or 0.
func (q Request) hostPort() uint16 {
	switch {
	case q.Op != Forward && q.Op != Allow:
		return 0
	case q.To != 0:
		return q.To
	}
	return q.slot().Port
}

// collide reports whether a new request wants the host port of another one that is for another
// port, or for the port of another guest. One that moves on a conflict takes another port.
func collide(a, b Request) bool {
	n := a.hostPort()
	if n == 0 || n != b.hostPort() || a.slot().Protocol != b.slot().Protocol || (Entry{Request: a}).Rule().OnConflict.Moves() {
		return false
	}
	if a.slot() == b.slot() && a.Demand == b.Demand && (a.Guest == b.Guest || a.Guest == "" || b.Guest == "") {
		return false // one of them decides
	}
	return a.HostAddress().Overlaps(b.HostAddress())
}

// inEffect names the requests that is is true of, for an error about one that is not there.
func (e *edit) inEffect(is func(Entry) bool) string {
	var names []string
	for _, one := range e.list {
		if is(one) {
			names = append(names, fmt.Sprintf("%q", one))
		}
	}
	if len(names) == 0 {
		return ""
	}
	return "; in effect: " + strings.Join(names, ", ")
}

// do makes the change that a request asks for.
func (e *edit) do(q Request, now time.Time, permitted permit) error {
	switch q.Op {
	case Forward:
		if i, ok := e.find(q, Forward); ok {
			if e.list[i].Request != q {
				return fmt.Errorf("%s exists already with another host port or address: remove it first with `fairlead forward rm`", q)
			}
			return nil
		}
		e.remove(q, Allow) // a forward allows as well
		return e.add(q, now, permitted)
	case Remove:
		if !e.remove(q, Forward, Allow, Deny, Expose) {
			return fmt.Errorf("nothing was added for %s: `fairlead forward ls` lists what was", q.target())
		}
	case Deny:
		e.remove(q, Allow)
		if !e.has(q, Deny) {
			return e.add(q, now, permitted)
		}
	case Allow:
		return e.allow(q, now, permitted)
	case Expose:
		e.remove(q, Expose) // its time begins again
		return e.add(q, now, permitted)
	case Hide:
		if !e.remove(q, Expose) {
			return fmt.Errorf("%s is not exposed%s", q.target(), e.inEffect(func(o Entry) bool { return o.Op == Expose && o.InEffect(now) }))
		}
	}
	return nil
}

// allow undoes a denial of what q selects, or else allows a port.
func (e *edit) allow(q Request, now time.Time, permitted permit) error {
	denies := func(o Entry) bool { return o.Op == Deny }
	switch {
	case e.remove(q, Deny):
	case q.Port == 0:
		return fmt.Errorf("%s is not denied%s", q.target(), e.inEffect(denies))
	case !e.has(q, Forward) && !e.has(q, Allow):
		return e.add(q, now, permitted)
	default:
		if closed := e.closedWithAll(q); closed != "" {
			return fmt.Errorf("%s is allowed already, and %s", q.target(), closed)
		}
	}
	return nil
}

// closedWithAll says which requests close all ports, "" if none does.
func (e *edit) closedWithAll(q Request) string {
	names := e.inEffect(func(o Entry) bool { return o.Op == Deny && o.All && (o.Guest == "" || o.Guest == q.Guest) })
	if names == "" {
		return ""
	}
	return "closed with all others until `fairlead allow --all`" + names
}
