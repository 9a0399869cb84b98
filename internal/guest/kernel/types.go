// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"sync"

	"github.com/cilium/ebpf/btf"
)

// Types caches the types of the running kernel (BTF) for all Objects of a start:
// reading them takes longer than loading the programs. The zero value is ready
// for use. It is safe for concurrent use; its users take turns.
type Types struct {
	mu     sync.Mutex // held while programs are loaded
	cache  *btf.Cache
	forgot bool

	// refused is why the kernel lets this process load no program for a trampoline, nil if
	// it does or that is not known. It is the same for all, so the others are not tried.
	refused error
}

// Forget frees the types. An Attach after that reads them anew.
func (t *Types) Forget() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.cache, t.forgot = nil, true
}

// lend calls f with the types, which nobody else uses meanwhile.
func (t *Types) lend(f func(*btf.Cache) error) error {
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
