// SPDX-License-Identifier: Apache-2.0

//go:build linux

package hook

import (
	"bytes"
	"errors"
	"fmt"
	"unsafe"

	"github.com/fairlead/fairlead/internal/kernel/bpf"
)

// CommitKind says what a CommitEvent is about.
type CommitKind uint8

// The kinds of changes, and the end of a commit.
const (
	CommitTable   = CommitKind(bpf.NftChangeCHANGE_TABLE)
	CommitChain   = CommitKind(bpf.NftChangeCHANGE_CHAIN)
	CommitRule    = CommitKind(bpf.NftChangeCHANGE_RULE)
	CommitElement = CommitKind(bpf.NftChangeCHANGE_ELEMENT)
	CommitEnd     = CommitKind(bpf.NftChangeCHANGE_END)
	// CommitMany says that a commit has more changes than are reported.
	CommitMany  = CommitKind(bpf.NftChangeCHANGE_MANY)
	commitStray = CommitKind(bpf.NftChangeCHANGE_STRAY)
)

// CommitEvent is one change of a commit, in the order in which the kernel made it.
type CommitEvent struct {
	Kind    CommitKind
	Deleted bool
	Family  uint8  // NFPROTO_*
	Table   string // its name
	Name    string // of the chain; of the set for CommitElement

	// Handle is the rule's, or for CommitElement that of the set.
	Handle uint64
	// Previous is the handle of the rule before a new one in its chain, or 0.
	Previous uint64

	// Of an element; nil for what it does not have. A map to verdicts has
	// IsVerdict, Verdict (its code) and, for jumps, Chain.
	Key, End, Value []byte
	Flags           uint32
	IsVerdict       bool
	Verdict         int32
	Chain           string

	Generation uint32 // of the ruleset, for CommitEnd
}

var errCommitRecord = errors.New("malformed record of a commit")

const commitRecordSize = int(unsafe.Sizeof(bpf.NftChangeEvent{}))

// maxCommitBytes is what the hooks can send at most.
const maxCommitBytes = 5 * len(bpf.NftChangeEvent{}.Bytes)

// decoder joins the chunks of records.
type decoder struct {
	head bpf.NftChangeEvent
	have []byte
}

// add takes the next record and reports whether e is complete. It copies what
// it keeps.
func (d *decoder) add(record []byte) (e CommitEvent, complete bool, err error) {
	var r bpf.NftChangeEvent
	if len(record) != commitRecordSize {
		return e, false, fmt.Errorf("%w: %d bytes, want %d", errCommitRecord, len(record), commitRecordSize)
	}
	copy(unsafe.Slice((*byte)(unsafe.Pointer(&r)), commitRecordSize), record)
	if int(r.Offset) != len(d.have) || int(r.Total) > maxCommitBytes ||
		len(d.have) > 0 && (r.Total != d.head.Total || r.Kind != d.head.Kind || r.Handle != d.head.Handle) {
		return e, false, fmt.Errorf("%w: byte %d of %d after %d", errCommitRecord, r.Offset, r.Total, len(d.have))
	}
	d.head = r
	d.have = append(d.have, r.Bytes[:min(len(r.Bytes), int(r.Total)-len(d.have))]...)
	if len(d.have) < int(r.Total) {
		return e, false, nil
	}
	e, err = change(&r, d.have)
	d.have = d.have[:0]
	return e, true, err
}

// change makes an event of a record and the bytes of all its chunks.
func change(r *bpf.NftChangeEvent, b []byte) (CommitEvent, error) {
	e := CommitEvent{
		Kind: CommitKind(r.Kind), Deleted: r.Deleted != 0, Family: r.Family,
		Handle: r.Handle, Previous: r.Previous, Generation: r.Generation,
	}
	ok := true
	name := func() string {
		s, rest, found := bytes.Cut(b, []byte{0})
		ok = ok && found
		b = rest
		return string(s)
	}
	take := func(n uint8) []byte {
		if int(n) > len(b) {
			ok = false
			return nil
		}
		if n == 0 {
			return nil
		}
		v := bytes.Clone(b[:n])
		b = b[n:]
		return v
	}
	switch e.Kind {
	case CommitEnd, CommitMany, commitStray:
		return e, nil
	case CommitTable:
		e.Table = name()
	case CommitChain, CommitRule:
		e.Table, e.Name = name(), name()
	case CommitElement:
		e.Table, e.Name = name(), name()
		e.Key, e.End, e.Value = take(r.KeyLength), take(r.EndLength), take(r.ValueLength)
		e.Flags, e.IsVerdict, e.Verdict = r.Flags, r.IsVerdict != 0, int32(r.Verdict)
		if e.IsVerdict && len(b) > 0 {
			e.Chain = name()
		}
	default:
		ok = false
	}
	if !ok || len(b) > 0 {
		return e, fmt.Errorf("%w: kind %d", errCommitRecord, r.Kind)
	}
	return e, nil
}
