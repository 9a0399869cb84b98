// SPDX-License-Identifier: Apache-2.0

//go:build linux

package run

import (
	"fmt"
	"os"
	"sync"

	"golang.org/x/term"
)

// Screen is the terminal at which a client is used. While a program runs it is in raw mode:
// the program's own terminal echoes, and makes signals of keys.
type Screen struct {
	// File is the terminal.
	File *os.File
	// Changed tells that the size may have changed, or that another program may have used the
	// terminal, as a shell does while this one is stopped.
	Changed <-chan os.Signal

	mu    sync.Mutex
	saved *term.State // nil before raw mode
	over  bool        // no raw mode any more
}

// terminal returns what the program's terminal is to be like.
func (s *Screen) terminal() (*Terminal, error) {
	columns, rows, err := term.GetSize(int(s.File.Fd()))
	if err != nil {
		return nil, fmt.Errorf("read the terminal's size: %w", err)
	}
	t := &Terminal{Size: Size{Rows: uint16(rows), Columns: uint16(columns)}, Type: os.Getenv("TERM")}
	if !typeSyntax.MatchString(t.Type) {
		t.Type = ""
	}
	return t, nil
}

// raw puts the terminal into raw mode.
func (s *Screen) raw() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.over {
		return nil
	}
	saved, err := term.MakeRaw(int(s.File.Fd()))
	if err != nil {
		return fmt.Errorf("put the terminal into raw mode: %w", err)
	}
	if s.saved == nil {
		s.saved = saved
	}
	return nil
}

// restore undoes raw, for good.
func (s *Screen) restore() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.over = true
	if s.saved != nil {
		_ = term.Restore(int(s.File.Fd()), s.saved) // it fails where the terminal has gone
	}
}
