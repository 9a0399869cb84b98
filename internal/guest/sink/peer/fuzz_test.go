// SPDX-License-Identifier: Apache-2.0

package peer

import (
	"encoding/json"
	"slices"
	"testing"

	"github.com/fairlead/fairlead/internal/port"
)

// What a file of entries may have been left with: no entry without an address, and what
// was read is read again.
func FuzzDecodeEntries(f *testing.F) {
	f.Add([]byte(`[{"protocol":"tcp","host":"127.0.0.1:80","remote":"192.168.127.2:80"},{"protocol":"udp","host":"[::1]:53"}]`))
	f.Add([]byte(`[{"protocol":"tcp"},{"host":""},null]`))
	f.Add([]byte(`null`))
	f.Fuzz(func(t *testing.T, b []byte) {
		entries, err := decodeEntries(b)
		if err != nil {
			return
		}
		for _, e := range entries {
			if !e.Host.IsValid() || e.Protocol != port.TCP && e.Protocol != port.UDP {
				t.Fatalf("entry %+v", e)
			}
		}
		again, err := json.Marshal(entries)
		if err != nil {
			t.Fatal(err)
		}
		if same, err := decodeEntries(again); err != nil || !slices.Equal(entries, same) {
			t.Fatalf("%+v, read again as %+v, %v", entries, same, err)
		}
	})
}
