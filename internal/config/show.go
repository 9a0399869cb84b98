// SPDX-License-Identifier: Apache-2.0

package config

import (
	"cmp"
	"slices"
)

// Setting is the value of one key, and where it comes from.
type Setting struct {
	Key   string `json:"key"`
	Value string `json:"value"` // commas separate those of a list
	From  string `json:"from"`  // "default", "FILE:LINE:COLUMN", FILE for a rules file's expose, a variable or a flag
}

// Settings returns the effective values of an agent, in the order of the documentation.
func (c *Agent) Settings() []Setting { return settings(c.fields(), c.from) }

// Settings returns the effective values of a host peer, in the order of the documentation.
func (c *Host) Settings() []Setting { return settings(c.fields(), c.from) }

// Reloaded returns the settings of a process that started with current and accepted next
// since: only the named ones take effect without a restart.
func Reloaded(current, next []Setting, keys ...string) []Setting {
	list := slices.Clone(current)
	for i := range list {
		if slices.Contains(keys, list[i].Key) && i < len(next) {
			list[i] = next[i]
		}
	}
	return list
}

// Waiting returns the keys of which such a process needs a restart to use the new values.
func Waiting(current, next []Setting, keys ...string) (list []string) {
	for i, s := range Reloaded(current, next, keys...) {
		if i < len(next) && s.Value != next[i].Value {
			list = append(list, s.Key)
		}
	}
	return list
}

// Words returns the values that flags of an agent accept, of those that accept words.
func (c *Agent) Words() map[string][]string { return flagWords(c.fields()) }

// Words returns the values that flags of a host peer accept, of those that accept words.
func (c *Host) Words() map[string][]string { return flagWords(c.fields()) }

func flagWords(fields []field) map[string][]string {
	byFlag := make(map[string][]string)
	for _, f := range fields {
		if list := f.Words(); len(list) > 0 {
			byFlag[f.flag] = list
		}
	}
	return byFlag
}

func settings(fields []field, from map[string]string) []Setting {
	list := make([]Setting, 0, len(fields))
	for i := range fields {
		f := &fields[i]
		list = append(list, Setting{f.Key, f.text(), cmp.Or(from[f.Key], "default")})
	}
	return list
}
