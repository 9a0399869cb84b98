// SPDX-License-Identifier: Apache-2.0

package hostpeer

import (
	"strings"
	"testing"
)

func TestRelayOfWSL(t *testing.T) {
	for text, want := range map[string]bool{
		"":                         true,
		"[wsl2]\r\nmemory=4GB\r\n": true,
		"[wsl2]\r\nlocalhostForwarding=false\r\n":      false,
		"\ufeff[WSL2]\n localhostforwarding = False\n": false,
		"[wsl2]\nnetworkingMode=mirrored\n":            false,
		"[experimental]\nlocalhostForwarding=false\n":  true,
		"[wsl2]\n#localhostForwarding=false\n":         true,
	} {
		if got, err := relays(strings.NewReader(text)); got != want || err != nil {
			t.Errorf("%q: %v, %v", text, got, err)
		}
	}
}
