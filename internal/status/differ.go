// SPDX-License-Identifier: Apache-2.0

package status

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Differences lists what two agents say differently of the ports of one guest. While nothing
// changes there is none, as a decision depends on the present state alone: fresh is the list of
// an agent that has just started. What sinks and hosts add is not compared, nor since when. A
// line is for example
//
//	8080/tcp 0.0.0.0: owner {"kind":"process","name":"a","id":"7"}, of a fresh agent {"kind":"process","name":"b","id":"8"}
func Differences(running, fresh List) (lines []string) {
	here, there := running.facts(), fresh.facts()
	for _, row := range keysOf(here, there) {
		a, b := here[row], there[row]
		switch {
		case b == nil:
			lines = append(lines, fmt.Sprintf("%s: a fresh agent lacks it: %v", row, a))
		case a == nil:
			lines = append(lines, fmt.Sprintf("%s: only a fresh agent has it: %v", row, b))
		default:
			for _, what := range keysOf(a, b) {
				if a[what] != b[what] {
					lines = append(lines, fmt.Sprintf("%s: %s %s, of a fresh agent %s", row, what, cmp.Or(a[what], "none"), cmp.Or(b[what], "none")))
				}
			}
		}
	}
	return lines
}

// keysOf returns the keys of both, sorted.
func keysOf[V any](a, b map[string]V) []string {
	keys := slices.AppendSeq(slices.Collect(maps.Keys(a)), maps.Keys(b))
	slices.Sort(keys)
	return slices.Compact(keys)
}

// facts are the rows of a list, by their fields as JSON, and the warnings of its sources.
func (l List) facts() map[string]map[string]string {
	rows := make(map[string]map[string]string, len(l.Publications))
	for _, p := range l.Publications {
		rows[strings.TrimSpace(fmt.Sprintf("%s %s", p.Slot(), p.guestAddress()))] = p.facts()
	}
	for _, s := range l.Sources {
		if len(s.Warnings) > 0 {
			rows["source "+s.Name] = map[string]string{"warnings": fmt.Sprintf("%q", s.Warnings)}
		}
	}
	return rows
}

// facts are what the guest says of a port, without times.
func (p Publication) facts() map[string]string {
	text, err := json.Marshal(p)
	var fields map[string]json.RawMessage
	if err := errors.Join(err, json.Unmarshal(text, &fields)); err != nil { // a row that no agent can send
		return map[string]string{"row": err.Error()}
	}
	for _, k := range []string{"hostAddresses", "state", "reason", "code", "rule", "since", "sinceAtLeast", "outcomes", "origins"} {
		delete(fields, k)
	}
	facts := make(map[string]string, len(fields)+1)
	for k, v := range fields {
		facts[k] = string(v)
	}
	var origins []string
	for _, o := range p.Origins {
		origins = append(origins, strings.TrimSpace(o.Source+" "+o.Detail+" "+o.Doubt))
	}
	slices.Sort(origins)
	facts["origins"] = fmt.Sprintf("%q", origins)
	return facts
}
