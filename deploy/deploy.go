// SPDX-License-Identifier: Apache-2.0

// Package deploy holds the files that start the agent with its machine, and the host peer
// with its user. They name the program as Program.
package deploy

import (
	_ "embed"
	"strings"
)

// Program is the path of fairlead in all of these files.
const Program = "/usr/local/bin/fairlead"

// AgentUnit is the agent's unit for systemd.
//
//go:embed systemd/fairlead-agent.service
var AgentUnit string

// HostUnit is the host peer's unit for systemd, of a user.
//
//go:embed systemd/fairlead-host.service
var HostUnit string

// AgentScript is the agent's service script for OpenRC.
//
//go:embed openrc/fairlead-agent
var AgentScript string

// WSLConf is what starts the agent by /etc/wsl.conf.
//
//go:embed wsl/wsl.conf
var WSLConf string

// SystemdQuote quotes one word of ExecStart (systemd.service(5), "Command lines").
func SystemdQuote(s string) string {
	return `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`, `%`, `%%`, `$`, `$$`, "\n", `\n`).Replace(s) + `"`
}
