// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/fairlead/fairlead/internal/config/words"
)

// ClientControl is the variable with the control socket that commands query. It is not
// FAIRLEAD_CONTROL, which is where agent and host peer listen: a shell that queries one of
// them could not start another.
const ClientControl = "FAIRLEAD_CLIENT_CONTROL"

// UnknownVariables describes the variables in environ (os.Environ) that begin with
// FAIRLEAD_ but are no setting of agent or host, and are similar to one: likely
// mistakes, which would be ignored silently.
func UnknownVariables(environ []string) (list []string) {
	agent, host := DefaultAgent(), DefaultHost()
	const prefix = "FAIRLEAD_"
	known := map[string]bool{prefix + "CONFIG": true, ClientControl: true}
	for _, f := range slices.Concat(agent.fields(), host.fields()) {
		known[f.env()] = true
	}
	var endings []string // without the prefix, which would make short names similar
	for _, name := range slices.Sorted(maps.Keys(known)) {
		endings = append(endings, strings.TrimPrefix(name, prefix))
	}
	for _, v := range environ {
		name, _, _ := strings.Cut(v, "=")
		ending, ours := strings.CutPrefix(name, prefix)
		if !ours || known[name] {
			continue
		}
		if best := words.MostSimilar(ending, endings); best != "" {
			list = append(list, fmt.Sprintf("environment variable %s is unknown (did you mean %q?)", name, prefix+best))
		}
	}
	return list
}

// OverriddenVariables describes the variables of older agents in environ (os.Environ) that
// ask for something else than fairlead's own variables, which count instead.
func OverriddenVariables(environ []string) (list []string) {
	values := make(map[string]string)
	for _, v := range environ {
		name, value, _ := strings.Cut(v, "=")
		values[name] = value
	}
	lookup := func(name string) (string, bool) {
		v, ok := values[name]
		return v, ok
	}
	agent, other := DefaultAgent(), DefaultAgent()
	fields, others := agent.fields(), other.fields()
	for i := range fields {
		f, o := &fields[i], &others[i]
		name, own := f.variable(lookup)
		older, isSet := lookup(f.older)
		if name != f.env() || f.older == "" || !isSet || fromOlder(f.older, older) == "" {
			continue
		}
		if f.setText(own) == nil && o.setText(fromOlder(f.older, older)) == nil && f.text() == o.text() {
			continue
		}
		list = append(list, fmt.Sprintf("environment variable %s is overridden by %s, which differs", f.older, name))
	}
	return list
}

// Given returns the variables that give an agent what a running one with these settings was
// given by flags and variables: with them and with its file, LoadAgent returns the same.
func Given(settings []Setting) (lookup func(string) (string, bool)) {
	values := make(map[string]string)
	agent := DefaultAgent()
	for _, f := range agent.fields() {
		for _, s := range settings {
			if s.Key == f.Key && slices.Contains([]string{"--" + f.flag, f.env(), f.older}, s.From) {
				values[f.env()] = s.Value
			}
		}
	}
	return func(name string) (string, bool) {
		value, ok := values[name]
		return value, ok
	}
}
