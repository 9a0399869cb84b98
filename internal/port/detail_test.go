// SPDX-License-Identifier: Apache-2.0

package port

import "testing"

type shout string

func (s shout) String() string         { return string(s) + "!" }
func (s shout) Equal(d Describer) bool { o, ok := d.(shout); return ok && o == s }

func TestDetail(t *testing.T) {
	for _, c := range []struct {
		a, b  Detail
		equal bool
	}{
		{Detail{}, NewDetail(""), true},
		{NewDetail("a!"), LazyDetail(shout("a")), true},
		{NewDetail("a"), LazyDetail(shout("a")), false},
		{LazyDetail(shout("a")), LazyDetail(shout("a")), true},
		{LazyDetail(shout("a")), LazyDetail(shout("b")), false},
		{LazyDetail(shout("a")), Detail{}, false},
	} {
		if c.a.Equal(c.b) != c.equal || c.b.Equal(c.a) != c.equal {
			t.Errorf("%q and %q: equal is not %t", c.a, c.b, c.equal)
		}
	}
}
