// SPDX-License-Identifier: Apache-2.0

// Package remote runs programs of a host for its guests. A guest's agent opens a stream of the
// link for each run. The host decides by the guest's name, which the link has proved, and by
// its own list; for whom in the guest the agent asks is the agent's word alone.
package remote

import (
	"encoding/json"

	"github.com/fairlead/fairlead/internal/wire"
)

// The kinds of frames, which are those between a client and its agent. The agent sends the
// first three, the host the others.
const (
	Stdin    = 'i' // at most Window bytes that are not taken
	StdinEnd = 'e'
	Signal   = 's' // its name, without SIG
	Stdout   = 'o'
	Stderr   = 'r'
	Taken    = 't' // that many bytes of stdin, as a number of JSON
	Exit     = 'x' // the last: an Ended
	Answer   = '{' // a Reply without its first byte
)

// Window is how much of stdin may be under way, in bytes. Output needs none: it stops while the
// agent does not read the stream, and nothing else waits behind it.
const Window = 64 << 10

// Reply is the host's decision, or why how a program ended is not known. One field is set.
type Reply struct {
	Granted bool     `json:"granted,omitempty"`
	Error   *Refusal `json:"error,omitempty"`
}

// Refusal is why a program is not run. The reasons are those of the publish socket: "policy",
// "limit", "program" and "request".
type Refusal struct {
	Reason  string `json:"reason"`
	Message string `json:"message"`
}

// Error implements error.
func (r *Refusal) Error() string { return r.Reason + ": " + r.Message }

// Ended is how a program ended.
type Ended struct {
	Code   int `json:"code"`
	Signal int `json:"signal,omitempty"` // that killed it, as Linux numbers it, else 0
}

// linuxSignal returns the number that Linux has for a signal, which others may number otherwise;
// 0 if it has none.
func linuxSignal(name string) int {
	return map[string]int{
		"HUP": 1, "INT": 2, "QUIT": 3, "ILL": 4, "TRAP": 5, "ABRT": 6, "BUS": 7, "FPE": 8, "KILL": 9, "USR1": 10, "SEGV": 11,
		"USR2": 12, "PIPE": 13, "ALRM": 14, "TERM": 15, "XCPU": 24, "XFSZ": 25, "SYS": 31,
	}[name]
}

// encode returns v, which is one of the types above, as JSON.
func encode(v any) []byte {
	b, _ := json.Marshal(v) // they cannot fail
	return b
}

// maxChunk is how much of an output is sent at once.
const maxChunk = wire.MaxRunFrame
