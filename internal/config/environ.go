// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/fairlead/fairlead/internal/yamltree"
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
	known := map[string]bool{"FAIRLEAD_CONFIG": true, ClientControl: true}
	for _, f := range slices.Concat(agent.fields(), host.fields()) {
		known[f.env()] = true
	}
	names := slices.Sorted(maps.Keys(known))
	for _, v := range environ {
		name, _, _ := strings.Cut(v, "=")
		if !strings.HasPrefix(name, "FAIRLEAD_") || known[name] {
			continue
		}
		if s := yamltree.Suggest(name, names); s != "" {
			list = append(list, fmt.Sprintf("environment variable %s is unknown%s", name, s))
		}
	}
	return list
}
