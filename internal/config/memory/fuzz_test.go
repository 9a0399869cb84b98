// SPDX-License-Identifier: Apache-2.0

package memory

import "testing"

func FuzzParse(f *testing.F) {
	f.Add([]byte("Name:\tfairlead\nRssAnon:\t    1234 kB\nRssFile:\t     567 kB\n"))
	f.Add([]byte("RssAnon: -9223372036854775808 kB\nRssFile: x\n"))
	f.Fuzz(func(_ *testing.T, b []byte) { _, _ = parse(b) })
}
