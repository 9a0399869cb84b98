// SPDX-License-Identifier: Apache-2.0

package config

import (
	"github.com/fairlead/fairlead/internal/publish/policy"
	runpolicy "github.com/fairlead/fairlead/internal/run/policy"
)

// Run configures what containers may have run in the guest, by the socket of Publish.
type Run struct {
	Allow runpolicy.Policy // nothing is run if it is empty; only the file has it
	Host  runpolicy.Policy // who may ask the host for its programs; only the file has it
	Jobs  int              `key:"jobs" flag:"run-jobs" kind:"n" min:"1" max:"1024" help:"maximum of programs that run at the same time for all containers (run.allow, run.host)"`
}

// HostRun configures what guests may have run on the host.
type HostRun struct {
	Allow  runpolicy.Policy // nothing is run if it is empty; only the file has it
	Jobs   int              `key:"jobs" flag:"run-jobs" kind:"n" min:"1" max:"1024" help:"maximum of programs that run at the same time for one guest (run.allow)"`
	AsRoot bool             `key:"asRoot" flag:"run-as-root" kind:"bool" help:"run programs for guests also where the host peer has the rights of root or of an administrator, which they get"`
}

// Publish configures what containers may ask for at a socket that is mounted into them.
type Publish struct {
	Allow       policy.Policy `key:"allow" list:"entries (\"- match: {name: web}\")" help:"what containers may ask for at the publish socket; nothing else is allowed"` // only the file has it
	Socket      string        `key:"socket" flag:"publish-socket" kind:"path" is:"absolute" help:"socket for containers that may publish or reach ports; it exists only if publish.allow, run.allow or run.host has an entry"`
	Ports       int           `key:"ports" flag:"publish-ports" kind:"n" min:"1" max:"256" help:"maximum of ports that one container publishes or reaches by the socket"`
	Connections int           `key:"connections" flag:"publish-connections" kind:"n" min:"1" max:"65535" help:"maximum of concurrent connections of one container by the socket"`
	Requests    int           `key:"requests" flag:"publish-requests" kind:"n" min:"1" max:"1000" help:"maximum of requests of one container at the socket in a second"`
}
