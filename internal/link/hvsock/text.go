// SPDX-License-Identifier: Apache-2.0

package hvsock

import (
	"bytes"
	"encoding/binary"
	"strings"
	"unicode/utf16"
)

// Lines returns the lines that wsl.exe printed, without blank ones. Its own output
// is UTF-16, unless WSL_UTF8 is set and supported; that of a Linux program is
// passed through.
func Lines(out []byte) []string {
	text := string(out)
	if bytes.HasPrefix(out, []byte{0xff, 0xfe}) || len(out) > 1 && bytes.IndexByte(out, 0) >= 0 {
		text = fromUTF16(out)
	}
	var lines []string
	for line := range strings.Lines(strings.TrimPrefix(text, "\ufeff")) {
		if line = strings.TrimSpace(line); line != "" {
			lines = append(lines, line)
		}
	}
	return lines
}

func fromUTF16(b []byte) string {
	units := make([]uint16, len(b)/2)
	for i := range units {
		units[i] = binary.LittleEndian.Uint16(b[2*i:])
	}
	return string(utf16.Decode(units))
}
