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

// Next is what to do about it, in the guest.
func (r *Refusal) Next() string {
	return refusals[r.Code].in(guestSide, strings.HasPrefix(r.Peer, "unix "))
}

// NextOnHost is what to do on a host that has no session with the guest at an endpoint, by
// the code of the reason: a link.Refusal, one of package host, or empty. Remote means that
// the guest refused the host; label is the guest's name in the configuration, which may be
// empty.
func NextOnHost(code, endpoint string, remote bool, label string) string {
	unix := strings.HasPrefix(endpoint, "unix:")
	switch {
	case code == "token-file":
		return "chown the file to the user of `fairlead host` and chmod 600 it, or fetch the token: `" + PairCommand(label) + "`"
	case (code == "token" || code == "proof") && !unix:
		return "give both sides the same token: `" + PairCommand(label) + "`"
	case code == "uid" && !remote:
		return "run the agent as root, or as the user of `fairlead host`"
	case code == "no-machine":
		return noMachine
	}
	if a, known := refusals[code]; known {
		return a.in(hostSide, unix)
	}
	return startGuest
}

const startGuest = "start the guest, and `fairlead agent` in it; run `fairlead doctor` there"

// noMachine is for a guest that may have started again with another CID.
const noMachine = "start the guest; if it has another CID now, connect to that: vsock://CID:PORT, where CID is that of its definition " +
	"(`fairlead host pair --libvirt DOMAIN` prints it; QEMU: guest-cid=CID); define one that stays"

// PairCommand is the command that fetches the token of a guest. The name is empty for a
// guest without one.
func PairCommand(name string) string {
	if name == "" {
		return "fairlead host pair"
	}
	return "fairlead host pair --guest " + name
}

// The sides of a link.
const (
	guestSide = iota
	hostSide
)

// advice is what to do about a refusal, by the side that is asked.
type advice struct {
	next [2]string
	unix string // on both sides of a unix link, if it differs there
}

func both(s string) advice { return advice{next: [2]string{s, s}} }

func (a advice) in(side int, unix bool) string {
	if unix && a.unix != "" {
		return a.unix
	}
	if a.next[side] == "" {
		return "read the logs of `fairlead host` and of the agent"
	}
	return a.next[side]
}

// refusals is the advice for each code.
var refusals = map[string]advice{
	"token":      tokens,
	"proof":      tokens,
	"uid":        allowUser,
	"permission": allowUser,
	"cid":        both("if this vsock context is meant to connect, restart the agent with `--allow-cids CID`"),
	"network":    both("run the agent in the guest and `fairlead host` outside: in a VM, or in another network namespace"),
	"version":    both("update the older of agent and host; `fairlead version` prints their versions"),
	"role": {next: [2]string{
		"let the host connect with `fairlead host`, not with a second agent",
		"connect to the endpoint of an agent, not to that of another host peer",
	}},
	"replaced": {next: [2]string{hostSide: "stop fairlead on the other host: an agent serves one at a time"}},
}

var allowUser = both("if this user is meant to connect, restart the agent with `--allow-uids UID`")

var tokens = advice{
	next: [2]string{guestSide: "give the host a copy of the agent's token: `fairlead host pair`"},
	unix: "give agent and host the same `--link-token FILE`, or neither of them: a unix link needs no token",
}
