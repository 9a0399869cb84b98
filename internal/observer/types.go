// SPDX-License-Identifier: Apache-2.0

package observer

import (
	"sync"

	"github.com/cilium/ebpf/btf"
)

// Types keeps the types of the running kernel for all that load programs at the
// start: to read them takes longer than to load the programs. Its users take
// turns. The zero value is ready for use; a nil *Types keeps nothing.
type Types struct {
	mu     sync.Mutex
	cache  *btf.Cache
	forgot bool
}

// Forget frees the types. Whoever loads programs after that reads them anew.
func (t *Types) Forget() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.cache, t.forgot = nil, true
}

// lend calls f with the types. Nobody else has them meanwhile.
func (t *Types) lend(f func(*btf.Cache) error) error {
	if t == nil {
		return f(btf.NewCache())
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.forgot {
		return f(btf.NewCache())
	}
	if t.cache == nil {
		t.cache = btf.NewCache()
	}
	return f(t.cache)
}
