// SPDX-License-Identifier: Apache-2.0

package region

import "testing"

// The kernel allows any byte but a few in a name.
func TestNamedPrefixOfHighestBytes(t *testing.T) {
	for _, c := range []struct {
		pattern, name string
		want          bool
	}{
		{"a\xff*", "a\xff1", true}, {"a\xff*", "a", false}, {"a\xff*", "b", false},
		{"a\xfe*", "a\xff", false}, {"\xff*", "\xff\xff", true}, {"\xff*", "\xfe", false},
	} {
		if got := Names().Contains(Named(c.pattern), c.name); got != c.want {
			t.Errorf("%q in %q: %t, want %t", c.name, c.pattern, got, c.want)
		}
	}
}
