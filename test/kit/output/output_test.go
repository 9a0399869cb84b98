// SPDX-License-Identifier: Apache-2.0

package output

import (
	"strings"
	"sync"
	"testing"
)

func TestBuffer(t *testing.T) {
	var b Buffer
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() {
			if n, err := b.Write([]byte(strings.Repeat("x", limit/2))); n != limit/2 || err != nil {
				t.Errorf("%d, %v", n, err)
			}
			_ = b.String()
		})
	}
	wg.Wait()
	if n := len(b.String()); n != limit {
		t.Errorf("%d bytes, want %d", n, limit)
	}
}
