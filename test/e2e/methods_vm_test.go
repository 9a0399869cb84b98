// SPDX-License-Identifier: Apache-2.0

//go:build linux && vm

package e2e

import (
	"errors"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/status/doctor"
)

// TestMethods records as attributes how each capability is observed on this kernel, and what
// is lost, for the report of test/vm. Nothing fails but a sign that doctor finds failing.
func TestMethods(t *testing.T) {
	r := listenerOnly(t)
	var report doctor.Report
	r.eventually("doctor knows all methods", func() error {
		out, errs, _ := fairlead(t, "doctor", "-o", "json", "--control", r.agentCtl)
		report = decode[doctor.Report](t, out)
		names := map[string]bool{}
		for _, c := range report.Checks {
			names[c.Area+" "+c.Name] = true
		}
		for _, want := range []string{"observer tcp-listen", "observer udp-dump", "observer legacy-tables", "observer nft-filter", "observer refused-port", "source nat"} {
			if !names[want] {
				return errors.New("no check " + want + errs)
			}
		}
		return nil
	})
	for _, c := range report.Checks {
		switch {
		case c.Area == "observer" && c.Name != "audits":
			t.Attr("capability/"+c.Name, attribute(c.Detail))
		case c.Area == "source" && c.Name == "nat":
			t.Attr("capability/nat", attribute(c.Detail))
		}
		if c.Area == "kernel" && c.State == doctor.Failing {
			t.Errorf("%s: %s", c.Name, c.Detail)
		}
	}
}

// attribute makes a text fit for an attribute, which is one line.
func attribute(s string) string { return strings.Join(strings.Fields(s), " ") }

// listenerOnly is a guest whose agent has the listener sink, and so all hooks.
func listenerOnly(t *testing.T) *rig {
	t.Helper()
	r := newRig(t, "--sink", "listener")
	r.startListening()
	return r
}
