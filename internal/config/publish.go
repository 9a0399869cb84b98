// SPDX-License-Identifier: Apache-2.0

package config

import "github.com/fairlead/fairlead/internal/config/policy"

// Publish configures what containers may ask for at a socket that is mounted into them.
type Publish struct {
	Allow       policy.Policy `key:"allow" list:"entries (\"- match: {name: web}\")" help:"what containers may ask for at the publish socket; nothing else is allowed"` // only the file has it
	Socket      string        `key:"socket" flag:"publish-socket" kind:"path" is:"absolute" help:"socket for containers that may publish or reach ports; it exists only if publish.allow has an entry"`
	Ports       int           `key:"ports" flag:"publish-ports" kind:"n" min:"1" max:"256" help:"maximum of ports that one container publishes or reaches by the socket"`
	Connections int           `key:"connections" flag:"publish-connections" kind:"n" min:"1" max:"65535" help:"maximum of concurrent connections of one container by the socket"`
	Requests    int           `key:"requests" flag:"publish-requests" kind:"n" min:"1" max:"1000" help:"maximum of requests of one container at the socket in a second"`
}
