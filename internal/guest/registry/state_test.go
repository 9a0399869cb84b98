// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"testing"
	"time"
)

// The table of the package comment: what leads from one state of an owner to the next. No
// engine can be asked for lists, so that the time alone ends a wait.
func TestNextStateOfAnOwner(t *testing.T) {
	at := func(s int) time.Time { return time.Unix(1_000_000, 0).Add(time.Duration(s) * time.Second) }
	waiting := doubt{owner: at(0)}
	searching := doubt{owner: at(0), search: true}
	left := doubt{owner: at(0), unclaimed: true}
	gone := doubt{owner: at(0), stopped: true}
	for name, c := range map[string]struct {
		before  wait
		doubt   doubt
		known   precedence
		deleted bool
		now     int
		stale   bool
		want    wait
	}{
		"nothing is in doubt":                    {wait{}, doubt{}, process, false, 0, false, wait{}},
		"a doubt":                                {wait{}, waiting, process, false, 5, false, wait{awaited, process, at(5)}},
		"a doubt while an engine is stale":       {wait{}, waiting, process, false, 5, true, wait{awaited, process, at(5)}},
		"the wait goes on":                       {wait{awaited, process, at(0)}, waiting, process, false, 9, false, wait{awaited, process, at(0)}},
		"more is known":                          {wait{awaited, unknown, at(0)}, waiting, process, false, 9, false, wait{awaited, process, at(0)}},
		"its time is over":                       {wait{awaited, process, at(0)}, waiting, process, false, 10, false, wait{givenUp, process, at(0)}},
		"not while an engine is stale":           {wait{awaited, process, at(0)}, waiting, process, false, 10, true, wait{awaited, process, at(0)}},
		"somebody is named":                      {wait{awaited, process, at(0)}, doubt{}, container, false, 9, false, wait{}},
		"a process is searched for, too":         {wait{awaited, process, at(0)}, searching, process, false, 9, false, wait{searched, process, at(0)}},
		"it is found":                            {wait{searched, process, at(0)}, waiting, process, false, 9, false, wait{awaited, process, at(0)}},
		"it is not found in time":                {wait{searched, process, at(0)}, searching, process, false, 10, false, wait{givenUp, process, at(0)}},
		"a new doubt":                            {wait{awaited, process, at(0)}, doubt{target: at(9)}, process, false, 9, false, wait{awaited, process, at(9)}},
		"what was given up stays so":             {wait{givenUp, process, at(0)}, waiting, process, false, 99, false, wait{givenUp, process, at(0)}},
		"what was given up, an engine stale":     {wait{givenUp, process, at(0)}, waiting, process, false, 99, true, wait{givenUp, process, at(0)}},
		"what was given up, less is known":       {wait{givenUp, process, at(0)}, waiting, unknown, false, 99, false, wait{awaited, unknown, at(99)}},
		"what was given up, a new doubt":         {wait{givenUp, process, at(0)}, doubt{owner: at(99)}, process, false, 99, false, wait{awaited, process, at(99)}},
		"a container stops":                      {wait{awaited, process, at(0)}, gone, process, false, 99, false, wait{state: stopped}},
		"what may start again does not end":      {wait{state: stopped}, gone, process, false, 9999, false, wait{state: stopped}},
		"the address is another's":               {wait{state: stopped}, waiting, process, false, 99, false, wait{awaited, process, at(99)}},
		"a Service is deleted":                   {wait{}, left, target, true, 5, false, wait{state: orphaned}},
		"its container has stopped":              {wait{state: orphaned}, doubt{owner: at(0), stopped: true, unclaimed: true}, target, false, 9, false, wait{state: orphaned}},
		"its rules are left":                     {wait{state: orphaned}, left, target, false, 9999, false, wait{state: orphaned}},
		"its rules go":                           {wait{state: orphaned}, doubt{}, process, false, 99, false, wait{}},
		"another rule is left":                   {wait{state: orphaned}, waiting, process, false, 99, false, wait{awaited, process, at(99)}},
		"a container claims its port":            {wait{state: orphaned}, doubt{target: at(0), unclaimed: true}, container, false, 99, false, wait{awaited, container, at(99)}},
		"rules without a Service from the start": {wait{}, left, target, false, 5, false, wait{awaited, target, at(5)}},
	} {
		ws := &waits{live: at(0)}
		if c.stale {
			ws.live = time.Time{}
		}
		if got := ws.next(c.before, c.doubt, c.known, c.deleted, at(c.now)); got != c.want {
			t.Errorf("%s: %+v, want %+v", name, got, c.want)
		}
	}
}
