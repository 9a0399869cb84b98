// SPDX-License-Identifier: Apache-2.0

// Package output keeps what a process or a logger writes, for tests that read it meanwhile.
package output

import (
	"bytes"
	"sync"
)

// Buffer keeps what is written to it. Its zero value is empty. It is safe for concurrent
// use.
type Buffer struct {
	mu      sync.Mutex
	b       bytes.Buffer
	changed chan struct{} // nil while nobody waits
}

// Write never fails.
func (b *Buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.changed != nil {
		close(b.changed)
		b.changed = nil
	}
	return b.b.Write(p)
}

// String returns what was written.
func (b *Buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// Changed returns a channel that the next Write closes. Who waits for a text gets the
// channel first, and then reads.
func (b *Buffer) Changed() <-chan struct{} {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.changed == nil {
		b.changed = make(chan struct{})
	}
	return b.changed
}
