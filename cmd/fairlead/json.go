// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"io"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"
)

// newEncoder returns the encoder of all JSON that commands print. Names come from the
// guest, and encoding/json leaves characters in them that control a terminal.
func newEncoder(w io.Writer) *json.Encoder { return json.NewEncoder(escaper{w}) }

// escaper writes JSON text with all characters escaped that are not printable: C1
// controls, DEL, and those that change the direction of text. JSON has such characters in
// strings only. A Write must not end within a character.
type escaper struct{ w io.Writer }

// Write implements io.Writer.
func (e escaper) Write(b []byte) (int, error) {
	if _, err := e.w.Write(escapeJSON(b)); err != nil {
		return 0, err
	}
	return len(b), nil
}

func escapeJSON(b []byte) []byte {
	var out []byte // nil until something is escaped
	for i := 0; i < len(b); {
		r, size := utf8.DecodeRune(b[i:])
		safe := unicode.IsPrint(r) || r < ' ' // whitespace between values; in strings it is escaped already
		switch {
		case !safe && out == nil:
			out = append(make([]byte, 0, len(b)+64), b[:i]...)
			fallthrough
		case !safe:
			out = appendEscaped(out, r)
		case out != nil:
			out = append(out, b[i:i+size]...)
		}
		i += size
	}
	if out == nil {
		return b
	}
	return out
}

func appendEscaped(b []byte, r rune) []byte {
	if r > 0xffff {
		hi, lo := utf16.EncodeRune(r)
		return fmt.Appendf(b, `\u%04x\u%04x`, hi, lo)
	}
	return fmt.Appendf(b, `\u%04x`, r)
}
