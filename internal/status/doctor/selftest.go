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
}
