// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"fmt"
	"time"
)

// selfTest judges each step of the self-test, if one was asked for.
func (j *judge) selfTest() {
	s := j.f.Tried
	if s == nil {
		return
	}
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
		j.add(area, "start", OK, "nothing tried: neither sockets nor NAT rules are observed", "")
	}
	if s.Compared != nil {
		j.compared(area, *s.Compared)
	}
}

// compared judges the comparison with an agent that started beside the one that runs: what that
// decides must not depend on what was before.
func (j *judge) compared(area string, c Comparison) {
	const name = "fresh agent"
	if c.Error != "" {
		j.add(area, name, Warning, "not compared with the one that runs: "+c.Error, "correct that, and run `fairlead doctor --self-test` again")
		return
	}
	for _, line := range c.Differences {
		j.add(area, name, Failing, line, "report this with the output of `fairlead doctor --self-test -v`; until then restart the agent")
	}
	if len(c.Differences) == 0 {
		j.add(area, name, OK, "has the same "+plural(c.Rows, "publication")+" as the one that runs", "")
	}
}
