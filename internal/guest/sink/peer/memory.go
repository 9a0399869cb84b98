// SPDX-License-Identifier: Apache-2.0

package peer

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"slices"

	"github.com/fairlead/fairlead/internal/config/trust"
	"github.com/fairlead/fairlead/internal/port"
)

// maxMemory bounds the file that Memory reads: some 200,000 entries.
const maxMemory = 16 << 20

// Entry is one host address that a peer was asked to serve.
type Entry struct {
	Protocol port.Protocol  `json:"protocol"`
	Host     netip.AddrPort `json:"host"`
	// Remote is what the peer was asked to connect to; its form is the sink's own.
	Remote string `json:"remote,omitempty"`
}

// Memory is the path of a file that holds the entries that a peer was asked for: an
// agent that was killed needs it to know which of the peer's entries are its own.
// It must be in a directory that only root writes to. "" keeps nothing.
type Memory string

// Load returns the entries that were saved last, none if there is no file or with
// an error.
func (m Memory) Load() ([]Entry, error) {
	if m == "" {
		return nil, nil
	}
	b, err := trust.ReadFile(string(m), maxMemory)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	var entries []Entry
	if err == nil {
		entries, err = decodeEntries(b)
	}
	if err != nil {
		return nil, fmt.Errorf("read the entries of the peer from %s: %w", m, err)
	}
	return entries, nil
}

func decodeEntries(b []byte) (entries []Entry, err error) {
	if err := json.Unmarshal(b, &entries); err != nil {
		return nil, err
	}
	return slices.DeleteFunc(entries, func(e Entry) bool {
		return !e.Host.IsValid() || e.Protocol != port.TCP && e.Protocol != port.UDP
	}), nil
}

// Save replaces the saved entries, atomically.
func (m Memory) Save(entries []Entry) error {
	if m == "" {
		return nil
	}
	if len(entries) == 0 {
		if err := os.Remove(string(m)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		return nil
	}
	b, err := json.Marshal(entries)
	if err != nil {
		return err
	}
	return trust.WriteFile(string(m), b)
}
