// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"maps"
	"math/rand/v2"
	"testing"
)

// Branches have what a map would have, each once.
func TestBranches(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	keys := []string{"", "a", "b", "c"}
	var bs branches
	want := map[string]*branch{}
	for step := range 1000 {
		key := keys[r.IntN(len(keys))]
		if r.IntN(2) == 0 {
			b := new(branch)
			bs.put(key, b)
			want[key] = b
		} else {
			bs.drop(key)
			delete(want, key)
		}
		got, n := map[string]*branch{}, 0
		for k, b := range bs.all() {
			got[k] = b
			n++
		}
		if !maps.Equal(got, want) || n != len(want) || bs.len() != len(want) {
			t.Fatalf("step %d: %v, %d of them, and %d are counted; want %v", step, got, n, bs.len(), want)
		}
		for _, k := range keys {
			if bs.get(k) != want[k] {
				t.Fatalf("step %d: %q is %p, want %p", step, k, bs.get(k), want[k])
			}
		}
		for range bs.all() {
			break // which panics if more is yielded
		}
	}
}
