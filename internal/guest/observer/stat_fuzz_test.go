// SPDX-License-Identifier: Apache-2.0

package observer

import (
	"os"
	"strings"
	"testing"
)

func FuzzParseStat(f *testing.F) {
	b, err := os.ReadFile("/proc/self/stat")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Add([]byte(strings.Replace(string(b), "(", "(a) Z 1 (", 1)))
	f.Fuzz(func(t *testing.T, b []byte) {
		if s, err := ParseStat(b); err == nil && !strings.Contains(string(b), "("+s.Name+")") {
			t.Errorf("%+v of %q", s, b)
		}
	})
}
