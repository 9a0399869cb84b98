// SPDX-License-Identifier: Apache-2.0

package wire

import "github.com/fairlead/fairlead/internal/port"

// Upper bounds of encoded sizes in bytes. Text can grow sixfold ("\u0000").
const (
	envelopeSize = 1024 + MaxIncomplete*(6*MaxWord+8)
	keySize      = 128 + 6*MaxZone
	partSize     = MaxControlFrame - envelopeSize
)

func publicationSize(p Publication) int {
	fixed := 400 + keySize*(1+len(p.Host)) + 8*(len(p.Owner.Labels)+len(p.Owner.LeftOut()))
	for _, o := range p.Others {
		fixed += 8 * (len(o.Labels) + len(o.LeftOut()))
	}
	return fixed + 6*p.TextBytes()
}

func outcomeSize(o Outcome) int { return 128 + 2*keySize + o.Reason.encodedSize() }

// TextBytes is what a publication holds on to beyond its fixed size, in bytes.
func (p Publication) TextBytes() int {
	n := len(p.Source) + ownerText(p.Owner)
	if p.Labels != nil {
		n += labelsSize + len(p.Labels.Rule) + len(p.Labels.Alias)
	}
	for _, o := range p.Others {
		n += otherSize + ownerText(o)
	}
	for _, d := range p.Demands {
		n += len(d)
	}
	return n
}

// labelsSize is the memory of what labels ask for beside its text.
const labelsSize = 48

// heldSize is the memory of how a user's container holds its port, beside its text.
const heldSize = 48

// otherSize is the memory that one of several owners takes beside its text.
const otherSize = 128

func ownerText(o port.Owner) int {
	n := len(o.Name) + len(o.ID) + len(o.Namespace) + len(o.Cluster)
	if h := o.Held; h != nil {
		n += heldSize + len(h.Engine) + len(h.User) + len(h.Process)
	}
	for k, v := range o.Labels {
		n += len(k) + len(v)
	}
	for _, k := range o.LeftOut() {
		n += len(k)
	}
	return n
}

// budget is the room left in one part. Its first item always fits: no single
// item within the limits exceeds a frame.
type budget struct{ bytes, items int }

func newBudget() *budget { return &budget{partSize, SnapshotPart} }

// take splits items into those that fit in b, whose room they use, and the rest.
func take[T any](items []T, b *budget, size func(T) int) (part, rest []T) {
	n := 0
	for n < len(items) && b.items > 0 {
		room := size(items[n])
		if room > b.bytes && b.items < SnapshotPart {
			break
		}
		b.bytes -= room
		b.items--
		n++
	}
	return items[:n:n], items[n:]
}

// Split returns s in parts that each fit in a frame, More set on all but the
// last. The parts share s's publications.
func (s Snapshot) Split() []Control {
	var parts []Control
	rest := s.Publications
	for {
		part := s
		part.Publications, rest = take(rest, newBudget(), publicationSize)
		if part.Publications == nil {
			part.Publications = []Publication{}
		}
		part.More = len(rest) > 0
		parts = append(parts, Control{Snapshot: &part})
		if !part.More {
			return parts
		}
	}
}

// Split returns c in parts that each fit in a frame, More set on all but the
// last. The parts share c's items.
func (c Change) Split() []Control {
	var parts []Control
	put, removed := c.Put, c.Removed
	for {
		part, room := Change{Base: c.Base, Generation: c.Generation}, newBudget()
		part.Put, put = take(put, room, publicationSize)
		if len(put) == 0 {
			part.Removed, removed = take(removed, room, func(port.Key) int { return keySize })
		}
		part.More = len(put)+len(removed) > 0
		parts = append(parts, Control{Change: &part})
		if !part.More {
			return parts
		}
	}
}

func unpublishedSize(p UnpublishedPort) int {
	n := len(p.Rule.Name) + len(p.Source) + ownerText(p.Owner)
	for _, d := range p.Demands {
		n += len(d)
	}
	return 256 + keySize + 4*len(p.Demands) + p.Reason.encodedSize() + 6*n
}

// Split returns u in messages that each fit in a frame, Reset set on the first, More set on
// all but the last. What is removed comes first, so that the receiver, which limits how
// many ports it keeps, has room for the others. They share u's items.
func (u Unpublished) Split() []Control {
	var parts []Control
	put, removed := u.Put, u.Removed
	if u.Unread != nil { // in a frame of its own: it can need a large part of one
		parts = append(parts, Control{Unpublished: &Unpublished{Unread: u.Unread, Omitted: u.Omitted}})
	}
	for len(parts) == 0 || len(put)+len(removed) > 0 {
		part, room := Unpublished{Omitted: u.Omitted}, newBudget()
		part.Removed, removed = take(removed, room, func(port.Key) int { return keySize })
		if len(removed) == 0 {
			part.Put, put = take(put, room, unpublishedSize)
		}
		parts = append(parts, Control{Unpublished: &part})
	}
	parts[0].Unpublished.Reset = u.Reset
	for _, p := range parts[:len(parts)-1] {
		p.Unpublished.More = true
	}
	return parts
}

// Split returns a in messages that each fit in a frame: Outcomes first, the Ack
// last. The outcomes of one key stay together; they must be
// adjacent in a.
func (a Ack) Split() []Control {
	parts := splitOutcomes(a.Outcomes)
	last := Ack{Generation: a.Generation}
	if n := len(parts); n > 0 {
		last.Outcomes, parts = parts[n-1], parts[:n-1]
	}
	var out []Control
	for _, p := range parts {
		out = append(out, Control{Outcomes: &Outcomes{Outcomes: p}})
	}
	return append(out, Control{Ack: &last})
}

// Split returns o in messages that each fit in a frame. The outcomes of one key
// stay together; outcomes of equal keys must be adjacent in o.
func (o Outcomes) Split() []Control {
	var out []Control
	for _, p := range splitOutcomes(o.Outcomes) {
		out = append(out, Control{Outcomes: &Outcomes{Outcomes: p}})
	}
	return out
}

func splitOutcomes(all []Outcome) (parts [][]Outcome) {
	for len(all) > 0 {
		part, rest := take(all, newBudget(), outcomeSize)
		// Step back to where a key begins, unless one key fills the part.
		n := len(part)
		for len(rest) > 0 && n > 0 && all[n-1].Key == rest[0].Key {
			n--
		}
		if n == 0 {
			n = len(part)
		}
		parts, all = append(parts, all[:n:n]), all[n:]
	}
	return parts
}

// Joiner puts the parts of snapshots and changes together. It holds at most
// MaxPublications and MaxSetBytes of text. The zero value is ready.
type Joiner struct {
	snapshot *Snapshot
	change   *Change
	text     int
}

// Add takes the next control message. It returns the whole message and true
// when c completes one; a message that comes in one piece is complete at once.
// Parts that do not belong together, or too many, are ErrMalformed: what was
// gathered is dropped, and the caller asks for a snapshot.
func (j *Joiner) Add(c Control) (Control, bool, error) {
	switch {
	case c.Snapshot != nil:
		return j.addSnapshot(c.Snapshot)
	case c.Change != nil:
		return j.addChange(c.Change)
	case j.snapshot != nil || j.change != nil:
		j.drop()
		return Control{}, false, malformed("a message between the parts of another")
	}
	return c, true, nil
}

func (j *Joiner) drop() { *j = Joiner{} }

func (j *Joiner) addSnapshot(s *Snapshot) (Control, bool, error) {
	switch h := j.snapshot; {
	case j.change != nil:
		j.drop()
		return Control{}, false, malformed("a snapshot between the parts of a change")
	case h == nil:
		first := *s
		j.snapshot = &first
	case h.Epoch != s.Epoch || h.Generation != s.Generation:
		j.drop()
		return Control{}, false, malformed("snapshot %d between the parts of snapshot %d", s.Generation, h.Generation)
	default:
		h.Publications = append(h.Publications, s.Publications...)
	}
	if err := j.bound(s.Publications, len(j.snapshot.Publications)); err != nil {
		return Control{}, false, err
	}
	if s.More {
		return Control{}, false, nil
	}
	whole := j.snapshot
	whole.More = false
	j.drop()
	return Control{Snapshot: whole}, true, nil
}

func (j *Joiner) addChange(c *Change) (Control, bool, error) {
	switch h := j.change; {
	case j.snapshot != nil:
		j.drop()
		return Control{}, false, malformed("a change between the parts of a snapshot")
	case h == nil:
		first := *c
		j.change = &first
	case h.Base != c.Base || h.Generation != c.Generation:
		j.drop()
		return Control{}, false, malformed("change to %d between the parts of the change to %d", c.Generation, h.Generation)
	default:
		h.Put = append(h.Put, c.Put...)
		h.Removed = append(h.Removed, c.Removed...)
	}
	if err := j.bound(c.Put, max(len(j.change.Put), len(j.change.Removed))); err != nil {
		return Control{}, false, err
	}
	if c.More {
		return Control{}, false, nil
	}
	whole := j.change
	whole.More = false
	j.drop()
	return Control{Change: whole}, true, nil
}

func (j *Joiner) bound(more []Publication, items int) error {
	for _, p := range more {
		j.text += p.TextBytes()
	}
	if items > MaxPublications || j.text > MaxSetBytes {
		j.drop()
		return malformed("more than %d publications, or than %d bytes of names and labels", MaxPublications, MaxSetBytes)
	}
	return nil
}
