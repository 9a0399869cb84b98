// SPDX-License-Identifier: Apache-2.0

package config

import (
	"cmp"
	"strings"
)

// Setting is the value of one key, and where it comes from.
type Setting struct {
	Key   string `json:"key"`
	Value string `json:"value"` // commas separate those of a list
	From  string `json:"from"`  // "default", "FILE:LINE:COLUMN", a variable or a flag
}

// Settings returns the effective values of an agent, in the order of the documentation.
func (c *Agent) Settings() []Setting { return settings(c.fields(), c.from) }

// Settings returns the effective values of a host peer, in the order of the documentation.
func (c *Host) Settings() []Setting { return settings(c.fields(), c.from) }

func settings(fields []field, from map[string]string) []Setting {
	list := make([]Setting, 0, len(fields))
	for i := range fields {
		f := &fields[i]
		list = append(list, Setting{f.key, strings.Join(f.get(), ","), cmp.Or(from[f.key], "default")})
	}
	return list
}
