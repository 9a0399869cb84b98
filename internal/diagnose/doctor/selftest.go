// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"fmt"
	"strings"
	"time"
)

// Failures returns the steps that failed. What ended the test early is one without a method.
func (s SelfTest) Failures() (list []SelfTestStep) {
	for _, step := range s.Steps {
		if step.Error != "" {
			list = append(list, step)
		}
	}
	if s.Error != "" {
		list = append(list, SelfTestStep{Name: "start", Error: s.Error, Remedy: "see the checks of area source; if all is well there, the machine was too busy: start the agent again"})
	}
	return list
}

// Summary lists the events that arrived, by which method and how fast.
func (s SelfTest) Summary() string {
	var events []string
	for _, step := range s.Steps {
		if step.Error == "" {
			took := time.Duration(step.Microseconds) * time.Microsecond
			events = append(events, fmt.Sprintf("%s %v (%s)", step.Name, took, step.Method))
		}
	}
	switch {
	case len(s.Steps) == 0 && s.Error == "":
		return "nothing tried: neither sockets nor NAT rules are observed"
	case len(events) == 0:
		return "none arrived"
	}
	return strings.Join(events, ", ")
}

// tried judges each step of the self-test that was asked of doctor.
func (j *judge) tried(s *SelfTest) {
	const area = "self-test"
	if s.Error != "" {
		j.add(area, "start", Failing, s.Error, "run `fairlead doctor --self-test` as root; see the checks of area source")
	}
	for _, step := range s.Steps {
		if step.Error != "" {
			detail := "no event"
			if step.Method != "" {
				detail += " by " + step.Method
			}
			j.add(area, step.Name, Failing, detail+": "+step.Error, step.Remedy)
			continue
		}
		took := time.Duration(step.Microseconds) * time.Microsecond
		j.add(area, step.Name, OK, fmt.Sprintf("by %s, after %v", step.Method, took), "")
	}
	if s.Error == "" && len(s.Steps) == 0 {
		j.add(area, "start", OK, s.Summary(), "")
	}
}

// selfTest judges what doctor tried, or else the agent at its start.
func (j *judge) selfTest() {
	if j.f.Tried != nil {
		j.tried(j.f.Tried)
		return
	}
	if j.f.Agent == nil {
		return
	}
	const area, name = "observer", "self-test"
	s := j.f.Agent.SelfTest
	switch {
	case s == nil:
		j.add(area, name, OK, "not done; `fairlead doctor --self-test` does it now, and `fairlead agent --self-test` at each start", "")
		return
	case s.Running:
		j.add(area, name, OK, "not yet done", "")
		return
	}
	failures := s.Failures()
	for _, f := range failures {
		detail := f.Name + ": " + f.Error
		if f.Method != "" {
			detail = fmt.Sprintf("%s (%s): %s", f.Name, f.Method, f.Error)
		}
		j.add(area, name, Warning, detail, f.Remedy)
	}
	if len(failures) == 0 {
		j.add(area, name, OK, s.Summary()+limited(s), "")
	}
}

// limited explains what was not tried.
func limited(s *SelfTest) string {
	if s.Shared == "" {
		return ""
	}
	return "; NAT rules were not tried, which takes CAP_SYS_ADMIN at the agent's start: " + s.Shared
}
