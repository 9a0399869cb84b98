// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"

	"github.com/fairlead/fairlead/internal/port"
)

var (
	// ErrTooLarge means that a frame exceeds its limit. After a read the stream
	// is out of step and of no more use.
	ErrTooLarge = errors.New("frame too large")
	// ErrMalformed means that a frame was read in full and refused: the stream
	// is still in step and the next frame can be read.
	ErrMalformed = errors.New("malformed message")
)

const frameHeader = 4 // bytes of the length in front of each frame, big-endian

// malformedError quotes what a peer sent, so its text is bounded and on one line.
type malformedError string

func (e malformedError) Error() string        { return "malformed message: " + string(e) }
func (e malformedError) Is(target error) bool { return target == ErrMalformed }

func malformed(format string, args ...any) error {
	return malformedError(port.OneLine(Text(fmt.Sprintf(format, args...))))
}

// readFrame returns the body of the next frame. Memory is taken as bytes
// arrive, not by the length that the peer claims. io.EOF means an end between frames.
func readFrame(r io.Reader, limit int) ([]byte, error) {
	var h [frameHeader]byte
	if _, err := io.ReadFull(r, h[:]); err != nil {
		return nil, err
	}
	size := binary.BigEndian.Uint32(h[:])
	if uint64(size) > uint64(limit) {
		return nil, fmt.Errorf("frame of %d bytes: %w (limit %d)", size, ErrTooLarge, limit)
	}
	n := int(size)
	body := make([]byte, 0, min(n, 4096))
	for len(body) < n {
		body = slices.Grow(body, min(n-len(body), max(len(body), 4096)))
		got := len(body)
		body = body[:min(n, cap(body))]
		if _, err := io.ReadFull(r, body[got:]); err != nil {
			return nil, midFrame(err)
		}
	}
	return body, nil
}

// midFrame turns an end inside a frame into what it is.
func midFrame(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// encode returns v as a frame, header included. Equal values give equal frames.
func encode(v any, limit int) ([]byte, error) {
	body, err := json.Marshal(v, json.Deterministic(true))
	if err != nil {
		return nil, err
	}
	if len(body) > limit {
		return nil, fmt.Errorf("frame of %d bytes: %w (limit %d)", len(body), ErrTooLarge, limit)
	}
	frame := make([]byte, frameHeader, frameHeader+len(body))
	binary.BigEndian.PutUint32(frame, uint32(len(body)))
	return append(frame, body...), nil
}

// writeFrame sends v as one frame in a single Write.
func writeFrame(w io.Writer, v any, limit int) error {
	frame, err := encode(v, limit)
	if err != nil {
		return err
	}
	_, err = w.Write(frame)
	return err
}

// decode reads body, which is one JSON value and nothing more, into v.
func decode(body []byte, v any) error {
	err := json.Unmarshal(body, v)
	if m, ok := errors.AsType[malformedError](err); ok {
		return m // without where in the message it is
	}
	return asMalformed(err)
}

// asMalformed returns a mistake in what a peer sent as ErrMalformed, nil for none.
func asMalformed(err error) error {
	if err == nil || errors.Is(err, ErrMalformed) {
		return err
	}
	return malformed("%v", err)
}

// union reads an object with exactly one field, which names the message. It
// returns a pointer to the pointer to fill, nil for an unknown name.
type union func(name string) any

// UnmarshalJSONFrom implements json.UnmarshalerFrom.
func (field union) UnmarshalJSONFrom(d *jsontext.Decoder) error {
	if t, err := d.ReadToken(); err != nil || t.Kind() != '{' {
		return malformed("not a JSON object")
	}
	t, err := d.ReadToken()
	if err != nil {
		return err
	}
	if t.Kind() == '}' {
		return malformed("no message in it")
	}
	name := t.String()
	dst := field(name)
	if dst == nil {
		return malformed("unknown message %q", name)
	}
	if err := json.UnmarshalDecode(d, dst); err != nil {
		return err
	}
	if t, err = d.ReadToken(); err != nil {
		return err
	}
	if t.Kind() != '}' {
		return malformed("%q after %s: one message only", t.String(), name)
	}
	return nil
}
