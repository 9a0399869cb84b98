// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/config/forwards"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/status"
)

// A change says what of it has no effect, and why.
func TestWriteChange(t *testing.T) {
	forward, deny := forwards.Request{Op: forwards.Forward, Protocol: port.TCP, Port: 1}, forwards.Request{Op: forwards.Deny, Protocol: port.TCP, Port: 1}
	for want, r := range map[string]status.Requested{
		"Added: x\n": {Request: forward, State: "active", Reason: "instead of host port 1"},
		"Added: x (pending: it is being opened)\n": {Request: forward, State: "pending"},
		"Added: x (conflict: taken)\n":             {Request: forward, State: "conflict", Reason: "taken"},
		"Added: x (denied by rule 1; elsewhere)\n": {Request: forward, State: "denied", Reason: "denied by rule 1", Code: port.DeniedByRule, Note: "elsewhere"},
		"Added: x (narrower)\n":                    {Request: forward, State: "active", Note: "narrower"},
		"Added: x (closes nothing now)\n":          {Request: deny, State: "denied", Reason: "closes nothing now"},
	} {
		other := deny
		other.Port = 2
		want = strings.Replace(want, "x", r.Request.String(), 1)
		v := status.ForwardChange{Result: forwards.Result{Added: []forwards.Request{r.Request}}, Forwards: status.Forwards{Requests: []status.Requested{{Request: other, Reason: "not it"}, r}}}
		var out strings.Builder
		if err := writeChange(&out, v); err != nil || out.String() != want {
			t.Errorf("%q, %v; want %q", out.String(), err, want)
		}
	}
	for want, v := range map[string]status.ForwardChange{
		"Nothing to change.\n":                                  {},
		"Removed: deny 1/tcp\n":                                 {Result: forwards.Result{Removed: []forwards.Request{deny}}},
		"Removed: deny 1/tcp\nStill closed: denied by rule 1\n": {Result: forwards.Result{Removed: []forwards.Request{deny}, Closed: "denied by rule 1"}},
	} {
		var out strings.Builder
		if err := writeChange(&out, v); err != nil || out.String() != want {
			t.Errorf("%q, %v; want %q", out.String(), err, want)
		}
	}
}

// HOST:GUEST is the host's and the guest's port, as docker, kubectl and ssh have it.
func TestHostAndGuestPort(t *testing.T) {
	for at, want := range map[string]forwards.Request{
		"8080:80":     {Op: forwards.Forward, Protocol: port.TCP, Port: 80, To: 8080},
		"8053:53/udp": {Op: forwards.Forward, Protocol: port.UDP, Port: 53, To: 8053},
		"80:80":       {Op: forwards.Forward, Protocol: port.TCP, Port: 80, To: 80},
		"8080":        {Op: forwards.Forward, Protocol: port.TCP, Port: 8080},
		"web:80":      {Op: forwards.Forward, Demand: "web:80/tcp"},
		"80/web:80":   {Op: forwards.Forward, Demand: "80/web:80/tcp"}, // a project may have this name
	} {
		q := forwards.Request{Op: forwards.Forward}
		if err := selectPort(&q, at); err != nil || q != want {
			t.Errorf("%s: %+v, %v; want %+v", at, q, err, want)
		}
	}
}

// The table has what is not as asked for beside the reason.
func TestForwardLsShowsNotes(t *testing.T) {
	var out strings.Builder
	err := writeForwards(&out, status.Forwards{Requests: []status.Requested{
		{Request: forwards.Request{Op: forwards.Forward, Demand: "web:80/tcp", To: 8080}, State: "active", Note: "note"},
		{Request: forwards.Request{Op: forwards.Allow, Protocol: port.UDP, Port: 53}, State: "denied", Reason: "reason", Note: "note"},
		{Request: forwards.Request{Op: forwards.Deny, Owner: "web", Guest: "dev"}, State: "denied"},
	}})
	for _, want := range []string{"forward web:80/tcp  ", "  8080  ", "  note\n", "  same  ", "  reason; note\n", "deny owner web of guest dev  ", "  -\n"} {
		if err != nil || !strings.Contains(out.String(), want) {
			t.Errorf("%v\n%s lacks %q", err, out.String(), want)
		}
	}
}
