// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/forwards"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/status"
)

// A change says what of it has no effect, and why.
func TestWriteChange(t *testing.T) {
	for want, r := range map[string]status.ForwardRule{
		"Added: x\n": {Action: "allow", State: "active", Reason: "instead of host port 1"},
		"Added: x (pending: it is being opened)\n": {Action: "allow", State: "pending"},
		"Added: x (conflict: taken)\n":             {Action: "allow", State: "conflict", Reason: "taken"},
		"Added: x (denied by rule 1; elsewhere)\n": {Action: "allow", State: "denied", Reason: "denied by rule 1", Code: port.DeniedByRule, Note: "elsewhere"},
		"Added: x (narrower)\n":                    {Action: "allow", State: "active", Note: "narrower"},
		"Added: x (closes nothing now)\n":          {Action: "deny", State: "denied", Reason: "closes nothing now"},
	} {
		r.Name = "x"
		v := status.ForwardChange{Result: forwards.Result{Added: []string{"x"}}, Forwards: status.Forwards{Rules: []status.ForwardRule{{Name: "y", Action: "deny", Reason: "not it"}, r}}}
		var out strings.Builder
		if err := writeChange(&out, v); err != nil || out.String() != want {
			t.Errorf("%q, %v; want %q", out.String(), err, want)
		}
	}
	for want, v := range map[string]status.ForwardChange{
		"Nothing to change.\n":                                     {},
		"Removed: deny 8080/tcp\n":                                 {Result: forwards.Result{Removed: []string{"deny 8080/tcp"}}},
		"Removed: deny 8080/tcp\nStill closed: denied by rule 1\n": {Result: forwards.Result{Removed: []string{"deny 8080/tcp"}, Closed: "denied by rule 1"}},
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
		"8080:80":     {Op: forwards.Add, Protocol: port.TCP, Port: 80, To: 8080},
		"8053:53/udp": {Op: forwards.Add, Protocol: port.UDP, Port: 53, To: 8053},
		"80:80":       {Op: forwards.Add, Protocol: port.TCP, Port: 80, To: 80},
		"8080":        {Op: forwards.Add, Protocol: port.TCP, Port: 8080},
		"web:80":      {Op: forwards.Add, Demand: "web:80/tcp"},
		"80/web:80":   {Op: forwards.Add, Demand: "80/web:80/tcp"}, // a project may have this name
	} {
		q := forwards.Request{Op: forwards.Add}
		if err := selectPort(&q, at); err != nil || q != want {
			t.Errorf("%s: %+v, %v; want %+v", at, q, err, want)
		}
	}
}

// The table has what is not as asked for beside the reason.
func TestForwardLsShowsNotes(t *testing.T) {
	var out strings.Builder
	err := writeForwards(&out, status.Forwards{Rules: []status.ForwardRule{
		{Name: "a", Action: "allow", State: "active", Note: "note"}, {Name: "b", Action: "allow", State: "denied", Reason: "reason", Note: "note"}, {Name: "c", Action: "deny", State: "denied"},
	}})
	for _, want := range []string{"  note\n", "  reason; note\n", "  -\n"} {
		if err != nil || !strings.Contains(out.String(), want) {
			t.Errorf("%v\n%s lacks %q", err, out.String(), want)
		}
	}
}
