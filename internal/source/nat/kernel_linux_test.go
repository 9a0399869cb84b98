// SPDX-License-Identifier: Apache-2.0

package nat

import "testing"

func FuzzRoute(f *testing.F) {
	f.Add(make([]byte, 12))
	f.Fuzz(func(t *testing.T, b []byte) {
		_, _ = parseRoute(b)
		_, _, _, _ = parseLink(b)
		_, _ = parseLegacyInfo(b)
	})
}
