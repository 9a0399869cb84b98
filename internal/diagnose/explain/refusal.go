// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"fmt"
	"strings"
	"time"
)

// Refusal is the last host that the agent refused.
type Refusal struct {
	At     time.Time `json:"at"`
	Peer   string    `json:"peer"`   // its address
	Code   string    `json:"code"`   // a link.Refusal
	Reason string    `json:"reason"` // for people
}

// Text describes the refusal.
func (r *Refusal) Text(now time.Time) string {
	return fmt.Sprintf("a host was refused %s ago: %s", now.Sub(r.At).Round(time.Second), r.Reason)
}

// NextUnixToken is what to do about a unix link whose ends have different tokens, or where
// one has none.
const NextUnixToken = "give agent and host the same `--link-token FILE`, or neither of them: a unix link needs no token"

// NextNetwork is what to do about an agent and a host in one network namespace.
const NextNetwork = "run the agent in the guest and `fairlead host` outside: in a VM, or in another network namespace"

// Next is what to do about it.
func (r *Refusal) Next() string {
	switch r.Code {
	case "token", "proof":
		if strings.HasPrefix(r.Peer, "unix ") {
			return NextUnixToken
		}
		return "give the host a copy of the agent's token: `fairlead host pair`"
	case "uid":
		return "if this user is meant to connect, restart the agent with `--allow-uids UID`"
	case "cid":
		return "allow this vsock context with --allow-cids of the agent"
	case "network":
		return NextNetwork
	case "version":
		return "update the older of agent and host; `fairlead version` prints their versions"
	case "role":
		return "let the host connect with `fairlead host`, not with a second agent"
	}
	return "read the logs of `fairlead host` and of the agent"
}
