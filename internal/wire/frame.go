// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"unicode/utf8"
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

// malformedError quotes what a peer sent, so its text is bounded.
type malformedError string

func (e malformedError) Error() string        { return "malformed message: " + string(e) }
func (e malformedError) Is(target error) bool { return target == ErrMalformed }

func malformed(format string, args ...any) error {
	return malformedError(cut(fmt.Sprintf(format, args...), MaxReason))
}

// readFrame returns the body of the next frame. Memory is taken as bytes
// arrive, not on the peer's word. io.EOF means an end between frames.
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

// encode returns v as a frame, header included.
func encode(v any, limit int) ([]byte, error) {
	var b bytes.Buffer
	b.Write(make([]byte, frameHeader))
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		return nil, err
	}
	frame := bytes.TrimSuffix(b.Bytes(), []byte{'\n'})
	if err := seal(frame, limit); err != nil {
		return nil, err
	}
	return frame, nil
}

// seal puts its length into the header of a frame.
func seal(frame []byte, limit int) error {
	n := len(frame) - frameHeader
	if n > limit {
		return fmt.Errorf("frame of %d bytes: %w (limit %d)", n, ErrTooLarge, limit)
	}
	binary.BigEndian.PutUint32(frame, uint32(n))
	return nil
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

// decodeUnion reads an object with exactly one field, which names the message.
// field returns a pointer to the pointer to fill, nil if it knows no such name.
func decodeUnion(body []byte, field func(name string) any) error {
	d := json.NewDecoder(bytes.NewReader(body))
	if t, err := d.Token(); err != nil || t != json.Delim('{') {
		return malformed("not a JSON object")
	}
	t, err := d.Token()
	if err != nil {
		return malformed("%v", err)
	}
	name, ok := t.(string)
	if !ok {
		return malformed("no message in it")
	}
	dst := field(name)
	if dst == nil {
		return malformed("unknown message %q", name)
	}
	if err := d.Decode(dst); err != nil {
		return malformed("%s: %v", name, err)
	}
	if t, err = d.Token(); err != nil || t != json.Delim('}') {
		if extra, ok := t.(string); ok {
			return malformed("%q after %s: one message only", extra, name)
		}
		return malformed("%s: %v", name, err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return malformed("%s: more follows", name)
	}
	return nil
}

// list is a JSON array of at most MaxListItems: a few bytes of text become a
// much larger struct, so the frame's limit alone does not bound memory.
type list[T any] []T

func (l *list[T]) UnmarshalJSON(b []byte) error {
	d := json.NewDecoder(bytes.NewReader(b))
	t, err := d.Token()
	if err != nil {
		return err
	}
	if t == nil {
		return nil
	}
	if t != json.Delim('[') {
		return errors.New("want a list")
	}
	for d.More() {
		if len(*l) == MaxListItems {
			return fmt.Errorf("more than %d items", MaxListItems)
		}
		var v T
		if err := d.Decode(&v); err != nil {
			return err
		}
		*l = append(*l, v)
	}
	return nil
}

// cut shortens s to at most n bytes at the end of a character. What is not
// UTF-8 is replaced first: JSON would do so later, and make it longer.
func cut(s string, n int) string {
	s = strings.ToValidUTF8(s, "\uFFFD")
	if len(s) <= n {
		return s
	}
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n]
}

// oneLine replaces what would break a line or steer a terminal.
func oneLine(s string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f || (r >= 0x80 && r < 0xa0) {
			return ' '
		}
		return r
	}, s)
}
