// SPDX-License-Identifier: Apache-2.0

package detect

import "testing"

func FuzzIsList(f *testing.F) {
	f.Add([]byte(`[]`))
	f.Add([]byte(`[{"local":"127.0.0.1:8080","remote":"192.168.127.2:8080","protocol":"tcp"}]`))
	f.Add([]byte(`<html>`))
	f.Fuzz(func(t *testing.T, b []byte) {
		if isList(b) == nil && len(b) < len("[]") {
			t.Errorf("%q is a list", b)
		}
	})
}
