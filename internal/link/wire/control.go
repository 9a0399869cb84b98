// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"io"
	"time"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"

	"github.com/fairlead/fairlead/internal/port"
)

// Frame is the only control message: a step of one table, or a part of one, and what its
// sender has seen of the tables of the other side. Package replica has the rules.
type Frame struct {
	Table string `json:"table,omitzero"` // empty: the frame is about no table
	// Base is the generation from which Put and Removed lead to Generation. 0 means that Put is
	// the whole table.
	Base       uint64         `json:"base,omitzero"`
	Generation uint64         `json:"generation,omitzero"`
	Part       int            `json:"part,omitzero"` // of a step that comes in parts, from 0
	More       bool           `json:"more,omitzero"` // another part follows
	Put        jsontext.Value `json:"put,omitzero"`  // a list of rows
	Removed    jsontext.Value `json:"removed,omitzero"`
	// Partial names sources that the sender has not read yet: their rows may be missing.
	Partial port.List[string] `json:"partial,omitempty"`
	Omitted int               `json:"omitted,omitzero"` // rows that are not sent, beyond a limit
	Resync  string            `json:"resync,omitzero"`  // asks for all tables, and why
	Seen    port.List[Seen]   `json:"seen,omitempty"`
}

// Seen says which generation of a table of the other side was applied.
type Seen struct {
	Table      string `json:"table"`
	Generation uint64 `json:"generation"`
}

// maxSeen is how many tables Frame.Seen has at most.
const maxSeen = 16

// WriteTimeout bounds how long a peer may take nothing of a control message: as long as it has
// for the answer to a ping.
const WriteTimeout = 30 * time.Second

// ReadControl reads the next control message, without its header.
func ReadControl(r io.Reader) ([]byte, error) { return readFrame(r, MaxControlFrame) }

// EncodeFrame returns f as it is sent, with its header.
func EncodeFrame(f *Frame) ([]byte, error) { return encode(f, MaxControlFrame) }

// DecodeFrame reads and checks a message without its header. Unknown fields are ignored.
func DecodeFrame(body []byte) (f Frame, err error) {
	if err := decode(body, &f); err != nil {
		return Frame{}, err
	}
	switch {
	case f.Generation < f.Base:
		err = malformed("generation %d is before its base %d", f.Generation, f.Base)
	case f.Omitted < 0:
		err = malformed("%d rows omitted", f.Omitted)
	case len(f.Partial) > MaxPartial:
		err = malformed("%d sources, at most %d", len(f.Partial), MaxPartial)
	case len(f.Seen) > maxSeen:
		err = malformed("%d tables seen, at most %d", len(f.Seen), maxSeen)
	case f.Table == "" && len(f.Put)+len(f.Removed) > 0:
		err = malformed("rows of no table")
	case f.Table == "" && f.Resync == "" && len(f.Seen) == 0:
		err = malformed("it says nothing")
	default:
		err = asMalformed(port.CheckText("resync", f.Resync, port.MaxReason))
	}
	for _, name := range f.Partial {
		if err == nil {
			err = asMalformed(port.CheckText("source", name, port.MaxWord))
		}
	}
	return f, err
}

// EncodeRow returns one row of a table, or a key. Equal rows give equal bytes.
func EncodeRow(v any) ([]byte, error) { return json.Marshal(v, json.Deterministic(true)) }

// DecodeRows reads and checks a list of rows, or of keys. Empty is none.
func DecodeRows[T any](list jsontext.Value, check func(T) error) ([]T, error) {
	if len(list) == 0 {
		return nil, nil
	}
	var rows port.List[T]
	if err := decode(list, &rows); err != nil {
		return nil, err
	}
	for _, v := range rows {
		if err := check(v); err != nil {
			return rows, asMalformed(err)
		}
	}
	return rows, nil
}

// Malformed returns an error that is ErrMalformed, on one line and not too long.
func Malformed(format string, args ...any) error { return malformed(format, args...) }

// Text cuts text to MaxReason bytes.
func Text(s string) string { return port.Cut(s, port.MaxReason) }

// FitSources returns names of sources as a Frame has them: not too many, and truncated.
func FitSources(names []string) port.List[string] {
	out := make(port.List[string], 0, min(len(names), MaxPartial))
	for _, n := range names[:cap(out)] {
		out = append(out, port.Cut(n, port.MaxWord))
	}
	return out
}
