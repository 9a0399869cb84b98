// SPDX-License-Identifier: Apache-2.0

package status

import (
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/fairlead/fairlead/internal/status/doctor"
)

func TestDoctorShowsFailuresLastAndFits(t *testing.T) {
	long := strings.Repeat("word ", 60)
	r := doctor.Report{Checks: []doctor.Check{
		{Area: "link", Name: "host", State: doctor.Failing, Detail: "none " + long, Remedy: "start one " + long},
		{Area: "nat", Name: "rules", State: doctor.Warning, Detail: "1 rule"},
		{Area: "observer", Name: "tcp", State: doctor.OK, Detail: "cgroup", More: "library says " + long},
	}}
	for _, c := range []struct {
		wide bool
		want []string
	}{{false, []string{"ok    observer tcp", "warn  nat rules", "FAIL  link host", "1 ok, 1 warning, 1 failed"}}, {true, []string{"library says"}}} {
		var b strings.Builder
		if err := WriteDoctor(&b, r, Style{Width: 80, Wide: c.wide}); err != nil {
			t.Fatal(err)
		}
		at := 0
		for _, w := range c.want {
			i := strings.Index(b.String()[at:], w)
			if i < 0 {
				t.Fatalf("no %q, or before the one before it, in\n%s", w, b.String())
			}
			at += i
		}
		if !c.wide && strings.Contains(b.String(), "library") {
			t.Errorf("details of what works:\n%s", b.String())
		}
		for line := range strings.Lines(b.String()) {
			if n := utf8.RuneCountInString(strings.TrimSpace(line)); n > 80 {
				t.Errorf("%d columns: %q", n, line)
			}
		}
	}
	var b strings.Builder
	if err := WriteDoctor(&b, r, Style{}); err != nil || strings.Count(b.String(), "\n") != 6 {
		t.Errorf("in a pipe lines are whole: %v\n%s", err, b.String())
	}
}

func TestNotRunningNamesWhatThisSystemHas(t *testing.T) {
	for goos, agent := range map[string]bool{"linux": true, "windows": false, "darwin": false} {
		if got := whatToStart(goos); strings.Contains(got, "agent") != agent || !strings.Contains(got, "fairlead host") {
			t.Errorf("%s: %s", goos, got)
		}
	}
}
