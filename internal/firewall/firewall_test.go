// SPDX-License-Identifier: Apache-2.0

package firewall

import (
	"net/netip"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/port"
)

// Each family and port is judged, once, and what differs is told for its address.
func TestCheckAll(t *testing.T) {
	calls := 0
	f := Firewall{judge: func(slot port.Slot, v6 bool, _ time.Duration) Report {
		calls++
		switch {
		case v6:
			return Report{Text: "drops it", Command: "let 6 in", Refuses: true}
		case slot.Port == 81:
			return Report{Text: "may drop it", Command: "show"}
		}
		return Report{Text: "lets them in"}
	}}
	for _, c := range []struct {
		at    []string
		want  Report
		calls int
	}{
		{[]string{"192.0.2.10:80", "192.0.2.11:80"}, Report{Text: "lets them in"}, 1},
		{[]string{"192.0.2.10:80", "[2001:db8::10]:80", "[2001:db8::11]:80"}, Report{Text: "192.0.2.10:80: lets them in; [2001:db8::10]:80: drops it", Command: "let 6 in", Refuses: true}, 2},
		{[]string{"[2001:db8::10]:80", "[2001:db8::10]:81"}, Report{Text: "drops it", Command: "let 6 in", Refuses: true}, 2},
		{[]string{"192.0.2.10:81", "[2001:db8::10]:80"}, Report{Text: "192.0.2.10:81: may drop it; [2001:db8::10]:80: drops it", Command: "show && let 6 in", Refuses: true}, 2},
	} {
		var at []netip.AddrPort
		for _, s := range c.at {
			at = append(at, netip.MustParseAddrPort(s))
		}
		calls = 0
		if got := f.CheckAll(port.TCP, at, 0); got != c.want || calls != c.calls {
			t.Errorf("%v: %+v after %d calls, want %+v after %d", c.at, got, calls, c.want, c.calls)
		}
	}
}
