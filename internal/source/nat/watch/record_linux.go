// SPDX-License-Identifier: Apache-2.0

package watch

import (
	"bytes"
	"errors"
	"fmt"
	"unsafe"

	"github.com/fairlead/fairlead/internal/kernel/bpf"
	"github.com/fairlead/fairlead/internal/source/nat/ruleset"
)

// The kinds of records that the hooks of nftables send.
const (
	changeTable   = uint8(bpf.NftChangeCHANGE_TABLE)
	changeChain   = uint8(bpf.NftChangeCHANGE_CHAIN)
	changeRule    = uint8(bpf.NftChangeCHANGE_RULE)
	changeElement = uint8(bpf.NftChangeCHANGE_ELEMENT)
	changeEnd     = uint8(bpf.NftChangeCHANGE_END)
	changeMany    = uint8(bpf.NftChangeCHANGE_MANY)
	changeStray   = uint8(bpf.NftChangeCHANGE_STRAY)
)

var errRecord = errors.New("malformed record of a commit")

const recordSize = int(unsafe.Sizeof(bpf.NftChangeEvent{}))

// maxRecordBytes is how many bytes all chunks of a record have at most.
const maxRecordBytes = 5 * len(bpf.NftChangeEvent{}.Bytes)

// decoder joins the chunks of records.
type decoder struct {
	head bpf.NftChangeEvent
	have []byte
}

// add takes the next chunk and reports whether the record is complete. Then head
// and have are that record, until the next call.
func (d *decoder) add(chunk []byte) (complete bool, err error) {
	var r bpf.NftChangeEvent
	if len(chunk) != recordSize {
		return false, fmt.Errorf("%w: %d bytes, want %d", errRecord, len(chunk), recordSize)
	}
	copy(unsafe.Slice((*byte)(unsafe.Pointer(&r)), recordSize), chunk)
	if r.Offset == 0 && len(d.have) == int(d.head.Total) {
		d.have = d.have[:0]
	}
	if int(r.Offset) != len(d.have) || int(r.Total) > maxRecordBytes ||
		len(d.have) > 0 && (r.Total != d.head.Total || r.Kind != d.head.Kind || r.Handle != d.head.Handle) {
		return false, fmt.Errorf("%w: byte %d of %d after %d", errRecord, r.Offset, r.Total, len(d.have))
	}
	d.head = r
	d.have = append(d.have, r.Bytes[:min(len(r.Bytes), int(r.Total)-len(d.have))]...)
	return len(d.have) == int(r.Total), nil
}

// message returns the complete record as the message that nfnetlink would send, but
// bare. It copies what it keeps.
func (d *decoder) message() (*ruleset.Message, error) {
	r := &d.head
	if r.Kind == changeEnd {
		return &ruleset.Message{Type: ruleset.MsgNewGen, Generation: r.Generation, Since: r.Since, Sparse: true}, nil
	}
	f := fields{rest: d.have}
	m := &ruleset.Message{
		Bare: true, Table: ruleset.TableID{Family: r.Family, Name: f.name()}, TableHandle: r.Table,
		Handle: r.Handle, Position: r.Previous,
	}
	either := func(add, del uint8) uint8 {
		if r.Deleted != 0 {
			return del
		}
		return add
	}
	switch r.Kind {
	case changeTable:
		m.Type = either(ruleset.MsgNewTable, ruleset.MsgDelTable)
	case changeChain:
		m.Type, m.Chain = either(ruleset.MsgNewChain, ruleset.MsgDelChain), f.name()
	case changeRule:
		m.Type, m.Chain = either(ruleset.MsgNewRule, ruleset.MsgDelRule), f.name()
	case changeElement:
		m.Type, m.Set = either(ruleset.MsgNewElem, ruleset.MsgDelElem), &ruleset.Set{Name: f.name(), Handle: r.Handle}
		m.Handle = 0
		m.Elements = []ruleset.Element{f.element(r)}
	default:
		f.broken = true
	}
	if f.broken || len(f.rest) > 0 {
		return nil, fmt.Errorf("%w: kind %d", errRecord, r.Kind)
	}
	return m, nil
}

// fields takes names and bytes from a record, one after the other.
type fields struct {
	rest   []byte
	broken bool
}

func (f *fields) name() string {
	s, rest, found := bytes.Cut(f.rest, []byte{0})
	f.rest = rest
	f.broken = f.broken || !found
	return string(s)
}

func (f *fields) take(n uint8) []byte {
	switch {
	case int(n) > len(f.rest):
		f.broken = true
		return nil
	case n == 0:
		return nil
	}
	v := bytes.Clone(f.rest[:n])
	f.rest = f.rest[n:]
	return v
}

func (f *fields) element(r *bpf.NftChangeEvent) ruleset.Element {
	e := ruleset.Element{Flags: r.Flags}
	e.Key, e.End, e.Data = f.take(r.KeyLength), f.take(r.EndLength), f.take(r.ValueLength)
	if r.IsVerdict != 0 {
		e.Verdict = &ruleset.Verdict{Code: int32(r.Verdict)}
		if len(f.rest) > 0 {
			e.Verdict.Chain = f.name()
		}
	}
	return e
}
