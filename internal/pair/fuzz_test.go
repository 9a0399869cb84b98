// SPDX-License-Identifier: Apache-2.0

package pair

import (
	"os"
	"testing"
)

func FuzzDomain(f *testing.F) {
	b, err := os.ReadFile("testdata/domain.xml")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Add([]byte("<domain><devices><vsock><cid auto='yes' address='4294967295'/></vsock></devices></domain>"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if cid, _, err := parseDomain("dev", b); err == nil && (cid < 3 || cid == 1<<32-1) {
			t.Errorf("address %d", cid)
		}
	})
}
