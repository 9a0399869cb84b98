// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package publish lets a container that has only a mounted socket reach a port of the
// guest's loopback, or have one of its own ports published. The container's client makes
// all sockets in its own network namespace and passes them to the agent, which needs
// no privilege to enter that namespace. A lease lasts as long as the client's connection.
package publish

import (
	"os"

	"github.com/fairlead/fairlead/internal/guest/peer"
)

// DefaultSocket is the path of the socket in the guest, and where a container mounts it.
const DefaultSocket = "/run/fairlead/publish.sock"

// reply is what the agent sends. One field is set, but for the first message.
type reply struct {
	peer.Hello
	Granted bool   `json:"granted,omitempty"`
	Connect uint64 `json:"connect,omitempty"` // asks for a connection to the container's port
}

// request is what the client sends: first what it wants, then answers to Connect.
type request struct {
	Nonce  string `json:"nonce,omitempty"`
	ToHost bool   `json:"toHost,omitempty"`
	Port   uint16 `json:"port,omitempty"`
	As     uint16 `json:"as,omitempty"` // with ToHost: the host port that is asked for

	Connect uint64 `json:"connect,omitempty"`
	Failed  string `json:"failed,omitempty"`  // why there is no connection
	Refused bool   `json:"refused,omitempty"` // the port refused it
}

// fileOf is a descriptor that the net package makes a socket of.
func fileOf(fd int) *os.File { return os.NewFile(uintptr(fd), "socket") }
