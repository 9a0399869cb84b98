// SPDX-License-Identifier: Apache-2.0

package output

import (
	"strings"
	"sync"
	"testing"

	"github.com/fairlead/fairlead/internal/testkit/wait"
)

func TestBuffer(t *testing.T) {
	const size = 1 << 20
	var b Buffer
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() {
			if n, err := b.Write([]byte(strings.Repeat("x", size))); n != size || err != nil {
				t.Errorf("%d, %v", n, err)
			}
			_ = b.String()
		})
	}
	wg.Wait()
	if n := len(b.String()); n != 3*size {
		t.Errorf("%d bytes, want %d", n, 3*size)
	}
}

func TestChanged(t *testing.T) {
	var b Buffer
	go func() {
		for range 100 {
			_, _ = b.Write([]byte("x"))
		}
	}()
	for {
		changed := b.Changed()
		if len(b.String()) == 100 {
			break
		}
		wait.For(t, "the next write", changed)
	}
	select {
	case <-b.Changed():
		t.Error("a change that has not come")
	default:
	}
}
