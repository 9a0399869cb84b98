// SPDX-License-Identifier: Apache-2.0

package host

import (
	"log/slog"
	"os"
	"path/filepath"
	"testing"
)

func FuzzMoved(f *testing.F) {
	f.Add([]byte(`[{"guest":"dev","protocol":"tcp","address":"0.0.0.0","guestPort":8080,"wanted":8080,"port":8081}]`))
	f.Add([]byte(`[{"guest":"dev"},null,{"address":"::ffff:1.2.3.4","wanted":1,"port":2}]`))
	path := filepath.Join(f.TempDir(), "moved.json")
	f.Fuzz(func(t *testing.T, b []byte) {
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		for id, m := range loadMoved(path, slog.New(slog.DiscardHandler)) {
			if m.Wanted == 0 || m.Port == 0 || !id.Address.IsValid() {
				t.Errorf("%v is %+v", id, m)
			}
		}
	})
}
