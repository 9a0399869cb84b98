// SPDX-License-Identifier: Apache-2.0

package config

import "github.com/fairlead/fairlead/internal/publish/policy"

// Publish configures what containers may ask for at a socket that is mounted into them.
type Publish struct {
	Allow       policy.Policy // nothing is served if it is empty; only the file has it
	Socket      string        // path
	Ports       int           // of one container at the same time, 1 to 256
	Connections int           // of one container at the same time, 1 to 65535
	Requests    int           // of one container in a second, 1 to 1000
}

func (c *Agent) publishFields() []field {
	return []field{
		one("publish.socket", "publish-socket", "path", &c.Publish.Socket, absolute, str,
			"socket for containers that may publish or reach ports; it exists only if publish.allow has an entry"),
		one("publish.ports", "publish-ports", "n", &c.Publish.Ports, whole[int](1, 256), number,
			"maximum of ports that one container publishes or reaches by the socket").atLeast(1),
		one("publish.connections", "publish-connections", "n", &c.Publish.Connections, whole[int](1, 1<<16-1), number,
			"maximum of concurrent connections of one container by the socket").atLeast(1),
		one("publish.requests", "publish-requests", "n", &c.Publish.Requests, whole[int](1, 1000), number,
			"maximum of requests of one container at the socket in a second").atLeast(1),
	}
}
