// SPDX-License-Identifier: Apache-2.0

package words

import (
	"strings"
	"testing"
)

func TestSuggest(t *testing.T) {
	words := []string{"holdDown", "link", "linkToken", "rules"}
	for got, want := range map[string]string{
		"holddown": "holdDown", "lnik": "link", "rule": "rules", "linktokn": "linkToken",
		"metrics": "", "": "", "x": "", strings.Repeat("l", 1000): "",
	} {
		if want != "" {
			want = ` (did you mean "` + want + `"?)`
		}
		if s := Suggest(got, words); s != want {
			t.Errorf("%.20q: %q, want %q", got, s, want)
		}
	}
}
