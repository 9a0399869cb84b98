// SPDX-License-Identifier: Apache-2.0

package status

import (
	"encoding/json"
	"strconv"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/port"
)

// A row is read by a client whatever its reasons: of many NAT rules, of long ones, of text that is not UTF-8.
func TestRowsOfAllReasonsAreRead(t *testing.T) {
	var many []port.Reason
	for i := range port.MaxReasons + 1 {
		many = append(many, port.Because(port.FromSources, "10.0.0."+strconv.Itoa(i)))
	}
	for name, reason := range map[string]port.Reason{
		"many":      port.Join(many...),
		"long":      port.Because(port.EarlierUnread, strings.Repeat("x", 4*port.MaxReason)),
		"not UTF-8": port.Because(port.OnInterface, "eth\xff"),
	} {
		row := row(80, port.Denied, "web")
		row.Fact.Decision.Reason = reason
		row.Because(reason)
		b, err := json.Marshal(List{Publications: []Publication{row}})
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		var l List
		if err := json.Unmarshal(b, &l); err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if got := l.Publications[0]; got.Code != reason.Code() || got.Reason != strings.ToValidUTF8(reason.String(), "\uFFFD") || got.Decision.Reason.Code() != reason.Code() {
			t.Errorf("%s: got %+v", name, got)
		}
	}
}
