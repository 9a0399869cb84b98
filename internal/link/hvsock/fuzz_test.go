// SPDX-License-Identifier: Apache-2.0

package hvsock

import "testing"

func FuzzParseGUID(f *testing.F) {
	f.Add("e0e16197-dd56-4a10-9195-5ee7a155a838")
	f.Add("{E0E16197-DD56-4A10-9195-5EE7A155A838}")
	f.Add("wsl1")
	f.Fuzz(func(t *testing.T, s string) {
		g, err := ParseGUID(s)
		if err != nil {
			return
		}
		if again, err := ParseGUID(g.String()); err != nil || again != g {
			t.Errorf("%q is %s, read again as %s, %v", s, g, again, err)
		}
	})
}
