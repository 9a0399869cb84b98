// SPDX-License-Identifier: Apache-2.0

package ruleset

import "testing"

func FuzzLegacyInfo(f *testing.F) {
	f.Add(make([]byte, 84))
	f.Fuzz(func(_ *testing.T, b []byte) { _, _ = ParseLegacyInfo(b) })
}
