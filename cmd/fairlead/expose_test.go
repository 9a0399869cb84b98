// SPDX-License-Identifier: Apache-2.0

package main

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/config/forwards"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/status"
)

const firewall = "A firewall of this system may still refuse others: `sudo nft list ruleset` shows its rules.\n"

var exposed8080 = forwards.Request{Op: forwards.Expose, Protocol: port.TCP, Port: 8080, Seconds: 60}

// What other machines reach also without the rule is not said to end with it.
func TestWriteExposed(t *testing.T) {
	lan := []netip.AddrPort{netip.MustParseAddrPort("192.0.2.10:8080")}
	const (
		until  = "8080/tcp is open to other machines until 2026-11-21 12:00:00 UTC:\n  192.0.2.10:8080\n"
		always = "8080/tcp is open to other machines without an end, by the configuration or because the agent asks for it:\n  192.0.2.10:8080\n"
		end    = "`fairlead expose 8080/tcp --end` undoes this.\n"
	)
	for want, v := range map[string]status.ForwardChange{
		until + firewall + end:          {Open: lan},
		always + firewall + end:         {Always: lan},
		always + until + firewall + end: {Open: lan, Always: lan},
		"8080/tcp is not open to other machines: taken. If that changes, it is, until 2026-11-21 12:00:00 UTC.\n" + end: {},
	} {
		v.Result = forwards.Result{Added: []forwards.Request{exposed8080}}
		v.Requests = []status.Requested{{Request: exposed8080, Reason: "taken", Until: time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)}}
		var out strings.Builder
		err := writeExposed(&out, status.Painter{}, "8080/tcp", "fairlead expose 8080/tcp --end", v)
		if err != nil || out.String() != want {
			t.Errorf("%v\n%swant\n%s", err, out.String(), want)
		}
	}
}

// What another rule exposes for longer is said to end then.
func TestWriteExposedByOthersToo(t *testing.T) {
	at := func(hour int) time.Time { return time.Date(2026, 11, 21, hour, 0, 0, 0, time.UTC) }
	const want = "8080/tcp is open to other machines until 2026-11-21 14:00:00 UTC:\n  192.0.2.10:8080\n" + firewall + "`mine` undoes this.\n"
	v := status.ForwardChange{
		Result:   forwards.Result{Added: []forwards.Request{exposed8080}},
		Forwards: status.Forwards{Requests: []status.Requested{{Request: exposed8080, Until: at(12)}}},
		Open:     []netip.AddrPort{netip.MustParseAddrPort("192.0.2.10:8080")}, Until: at(14),
	}
	var out strings.Builder
	if err := writeExposed(&out, status.Painter{}, "8080/tcp", "mine", v); err != nil || out.String() != want {
		t.Errorf("%v\n%swant\n%s", err, out.String(), want)
	}
}

// What of an exposure remains closed is told beside what is open, and else beside why not.
func TestWriteExposedNotes(t *testing.T) {
	r := status.Requested{Request: exposed8080, Reason: "denied by rule 1", Note: "a note"}
	for want, open := range map[string][]netip.AddrPort{
		"not open to other machines: denied by rule 1; a note. If": nil,
		":\n  192.0.2.10:8080\na note\n" + firewall:                {netip.MustParseAddrPort("192.0.2.10:8080")},
	} {
		v := status.ForwardChange{Result: forwards.Result{Added: []forwards.Request{r.Request}}, Forwards: status.Forwards{Requests: []status.Requested{r}}, Open: open}
		var out strings.Builder
		err := writeExposed(&out, status.Painter{}, "8080/tcp", "x", v)
		if err != nil || !strings.Contains(out.String(), want) {
			t.Errorf("%v\n%slacks %q", err, out.String(), want)
		}
	}
}
