// SPDX-License-Identifier: Apache-2.0

// Package output keeps what a process or a logger writes, for tests that read it meanwhile.
package output

import (
	"bytes"
	"sync"
)

const limit = 1 << 20 // bytes

// Buffer keeps the first MiB that is written to it. Its zero value is empty. It is safe for
// concurrent use.
type Buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

// Write never fails: what is beyond the limit is dropped.
func (b *Buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.b.Write(p[:min(len(p), limit-b.b.Len())])
	return len(p), nil
}

// String returns what was written.
func (b *Buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}
