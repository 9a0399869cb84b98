// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"bytes"
	"net/netip"
	"strconv"

	"github.com/fairlead/fairlead/internal/port"
)

// What ports that come and go are told by, and what is answered, is written and
// read here without reflection: these messages make up nearly all of the link,
// and encoding/json takes ten times as long. What is written is byte for byte
// what encoding/json writes; what is read is that form alone. All else (text that
// needs escapes, labels, other orders of fields) is left to encoding/json.

// appendControl appends c as JSON; false means that it is not for here.
func appendControl(b []byte, c *Control) ([]byte, bool) {
	w := writer{b: b, ok: true}
	switch {
	case c.Snapshot != nil && len(c.Snapshot.Publications) > 0:
		s := c.Snapshot
		w.raw(`{"snapshot":{"epoch":`)
		w.text(s.Epoch)
		w.number(`,"generation":`, s.Generation)
		w.publications(`,"publications":[`, s.Publications)
		w.more(s.More)
	case c.Change != nil:
		m := c.Change
		w.number(`{"change":{"base":`, m.Base)
		w.number(`,"generation":`, m.Generation)
		if len(m.Put) > 0 {
			w.publications(`,"put":[`, m.Put)
		}
		for i := range m.Removed {
			w.between(i, `,"removed":[`)
			w.raw("{")
			w.key(&m.Removed[i])
			w.raw("}")
		}
		if len(m.Removed) > 0 {
			w.raw("]")
		}
		w.more(m.More)
	case c.Ack != nil:
		w.number(`{"ack":{"generation":`, c.Ack.Generation)
		if len(c.Ack.Outcomes) > 0 {
			w.outcomes(`,"outcomes":[`, c.Ack.Outcomes)
		}
	case c.Outcomes != nil && len(c.Outcomes.Outcomes) > 0:
		w.outcomes(`{"outcomes":{"outcomes":[`, c.Outcomes.Outcomes)
	default:
		return nil, false
	}
	w.raw("}}")
	return w.b, w.ok
}

// controlSize is about how many bytes c takes.
func controlSize(c *Control) int {
	const head, publication, outcome, key = 128, 224, 128, 64
	switch {
	case c.Snapshot != nil:
		return head + publication*len(c.Snapshot.Publications)
	case c.Change != nil:
		return head + publication*len(c.Change.Put) + key*len(c.Change.Removed)
	case c.Ack != nil:
		return head + outcome*len(c.Ack.Outcomes)
	case c.Outcomes != nil:
		return head + outcome*len(c.Outcomes.Outcomes)
	}
	return head
}

// writer appends to b; ok ends with the first text that needs escapes.
type writer struct {
	b  []byte
	ok bool
}

func (w *writer) raw(s string) { w.b = append(w.b, s...) }

func (w *writer) number(name string, n uint64) {
	w.raw(name)
	w.b = strconv.AppendUint(w.b, n, 10)
}

// between begins a list before its first item, and parts the others.
func (w *writer) between(i int, begin string) {
	if i == 0 {
		w.raw(begin)
	} else {
		w.raw(",")
	}
}

func (w *writer) more(more bool) {
	if more {
		w.raw(`,"more":true`)
	}
}

func (w *writer) text(s string) {
	w.raw(`"`)
	w.raw(s)
	w.quote(len(w.b) - len(s))
}

// quote ends a text that began at a place of b.
func (w *writer) quote(from int) {
	w.ok = w.ok && simple(w.b[from:])
	w.raw(`"`)
}

// simple reports whether text stands in JSON as it is.
func simple[T string | []byte](text T) bool {
	for i := range len(text) {
		if c := text[i]; c < ' ' || c > '~' || c == '"' || c == '\\' {
			return false
		}
	}
	return true
}

func (w *writer) key(k *port.Key) {
	w.raw(`"protocol":`)
	w.text(k.Protocol.String())
	w.raw(`,"address":"`)
	from := len(w.b)
	if k.Address.IsValid() {
		w.b = k.Address.AppendTo(w.b)
	}
	w.quote(from)
	w.number(`,"port":`, uint64(k.Port))
}

func (w *writer) addrPort(a netip.AddrPort) {
	w.raw(`"`)
	from := len(w.b)
	if a.Addr().IsValid() {
		w.b = a.AppendTo(w.b)
	} else if a.Port() != 0 {
		w.ok = false
	}
	w.quote(from)
}

func (w *writer) publications(begin string, ps []Publication) {
	for i := range ps {
		p := &ps[i]
		w.between(i, begin)
		w.raw("{")
		w.key(&p.Key)
		if p.DualStack {
			w.raw(`,"dualStack":true`)
		}
		w.raw(`,"host":[`)
		w.ok = w.ok && p.Host != nil
		for j, h := range p.Host {
			w.between(j, "")
			w.addrPort(h)
		}
		w.raw(`],"owner":{"kind":`)
		w.text(p.Owner.Kind.String())
		w.raw(`,"name":`)
		w.text(p.Owner.Name)
		w.raw(`,"id":`)
		w.text(p.Owner.ID)
		if p.Owner.Namespace != "" {
			w.raw(`,"namespace":`)
			w.text(p.Owner.Namespace)
		}
		w.ok = w.ok && len(p.Owner.Labels) == 0
		w.raw("}")
		if p.Source != "" {
			w.raw(`,"source":`)
			w.text(p.Source)
		}
		w.raw("}")
	}
	w.raw("]")
}

func (w *writer) outcomes(begin string, os []Outcome) {
	for i := range os {
		o := &os[i]
		w.between(i, begin)
		w.raw("{")
		w.key(&o.Key)
		w.raw(`,"state":`)
		w.text(o.State.String())
		w.raw(`,"hostAddress":`)
		w.addrPort(o.HostAddress)
		if o.Reason != "" {
			w.raw(`,"reason":`)
			w.text(o.Reason)
		}
		w.raw("}")
	}
	w.raw("]")
}

// parseControl reads what appendControl writes; false means that it is something
// else, which may well be a message. It checks no limits but that of lists.
func parseControl(body []byte) (c Control, ok bool) {
	r := reader{b: body}
	switch {
	case r.is(`{"change":{"base":`):
		m := &Change{Base: r.number(1<<64 - 1)}
		r.want(`,"generation":`)
		m.Generation = r.number(1<<64 - 1)
		if r.is(`,"put":[`) {
			m.Put = items(&r, (*reader).publication)
		}
		if r.is(`,"removed":[`) {
			m.Removed = items(&r, func(r *reader, k *port.Key, _ *port.Key) {
				r.want("{")
				r.key(k)
				r.want("}")
			})
		}
		m.More = r.is(`,"more":true`)
		c.Change = m
	case r.is(`{"snapshot":{"epoch":`):
		s := &Snapshot{Epoch: string(r.text())}
		r.want(`,"generation":`)
		s.Generation = r.number(1<<64 - 1)
		r.want(`,"publications":[`)
		s.Publications = items(&r, (*reader).publication)
		s.More = r.is(`,"more":true`)
		c.Snapshot = s
	case r.is(`{"ack":{"generation":`):
		a := &Ack{Generation: r.number(1<<64 - 1)}
		if r.is(`,"outcomes":[`) {
			a.Outcomes = items(&r, (*reader).outcome)
		}
		c.Ack = a
	case r.is(`{"outcomes":{"outcomes":[`):
		c.Outcomes = &Outcomes{Outcomes: items(&r, (*reader).outcome)}
	default:
		return Control{}, false
	}
	r.want("}}")
	if r.bad || len(r.b) > 0 {
		return Control{}, false
	}
	return c, true
}

// reader takes from the front of b; bad begins with what it does not know.
type reader struct {
	b   []byte
	bad bool
}

// is takes s if it comes next.
func (r *reader) is(s string) bool {
	if len(r.b) < len(s) || string(r.b[:len(s)]) != s {
		return false
	}
	r.b = r.b[len(s):]
	return true
}

func (r *reader) want(s string) {
	if !r.is(s) {
		r.bad = true
	}
}

func (r *reader) number(most uint64) uint64 {
	n := 0
	for n < len(r.b) && r.b[n] >= '0' && r.b[n] <= '9' {
		n++
	}
	v, err := strconv.ParseUint(string(r.b[:n]), 10, 64)
	if err != nil || v > most || n > 1 && r.b[0] == '0' {
		r.bad = true
		return 0
	}
	r.b = r.b[n:]
	return v
}

// text lends a text that holds no escapes.
func (r *reader) text() []byte {
	r.want(`"`)
	n := bytes.IndexByte(r.b, '"')
	if n < 0 || !simple(r.b[:n]) {
		r.bad = true
		return nil
	}
	t := r.b[:n]
	r.b = r.b[n+1:]
	return t
}

// again returns a text as a string, last if it is the same: what comes together
// is often one owner's.
func (r *reader) again(last string) string {
	if t := r.text(); string(t) != last {
		return string(t)
	}
	return last
}

func (r *reader) key(k *port.Key) {
	r.want(`"protocol":`)
	switch string(r.text()) {
	case "tcp":
		k.Protocol = port.TCP
	case "udp":
		k.Protocol = port.UDP
	default:
		r.bad = true
	}
	r.want(`,"address":`)
	a, err := netip.ParseAddr(string(r.text()))
	k.Address, r.bad = a, r.bad || err != nil
	r.want(`,"port":`)
	k.Port = uint16(r.number(1<<16 - 1))
}

func (r *reader) addrPort() netip.AddrPort {
	t := r.text()
	if len(t) == 0 {
		return netip.AddrPort{}
	}
	a, err := netip.ParseAddrPort(string(t))
	r.bad = r.bad || err != nil
	return a
}

// items reads a list of at least one item to its end. Each is read with the one
// before it, a zero one at first.
func items[T any](r *reader, read func(r *reader, item, last *T)) []T {
	var first T
	last := &first
	list := make([]T, 0, min(1+bytes.Count(r.b, []byte(`},{`)), SnapshotPart))
	for !r.bad {
		if len(list) == MaxListItems {
			r.bad = true // who knows all forms says so
			break
		}
		list = append(list, first)
		item := &list[len(list)-1]
		read(r, item, last)
		if last = item; !r.is(",") {
			r.want("]")
			break
		}
	}
	return list
}

func (r *reader) publication(p, last *Publication) {
	r.want("{")
	r.key(&p.Key)
	p.DualStack = r.is(`,"dualStack":true`)
	r.want(`,"host":[`)
	p.Host = []netip.AddrPort{}
	for !r.is("]") && !r.bad {
		if len(p.Host) > 0 {
			r.want(",")
		} else {
			p.Host = make([]netip.AddrPort, 0, 1)
		}
		p.Host = append(p.Host, r.addrPort())
	}
	r.want(`,"owner":{"kind":`)
	_ = p.Owner.Kind.UnmarshalText(r.text()) // knows all
	r.want(`,"name":`)
	p.Owner.Name = r.again(last.Owner.Name)
	r.want(`,"id":`)
	p.Owner.ID = r.again(last.Owner.ID)
	if r.is(`,"namespace":`) {
		p.Owner.Namespace = r.again(last.Owner.Namespace)
	}
	r.want("}")
	if r.is(`,"source":`) {
		p.Source = r.again(last.Source)
	}
	r.want("}")
}

func (r *reader) outcome(o, last *Outcome) {
	r.want("{")
	r.key(&o.Key)
	r.want(`,"state":`)
	if err := o.State.UnmarshalText(r.text()); err != nil {
		r.bad = true
	}
	r.want(`,"hostAddress":`)
	o.HostAddress = r.addrPort()
	if r.is(`,"reason":`) {
		o.Reason = r.again(last.Reason)
	}
	r.want("}")
}
