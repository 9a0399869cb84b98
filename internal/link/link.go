// SPDX-License-Identifier: Apache-2.0

// Package link is the authenticated, multiplexed connection between guest
// agent and host peer, over any net.Conn: handshake, proof, streams, and the
// dialers and listeners for unix and vsock.
package link

import (
	"context"
	"errors"
	"net"
)

// Stream is one multiplexed stream of a session.
type Stream interface {
	net.Conn
	// CloseWrite ends the writing side; the peer reads io.EOF after what was written.
	CloseWrite() error
	// Reset aborts both directions: what is pending is lost and the peer's next
	// read or write fails with an error that errors.Is ErrReset.
	Reset() error
}

// ErrReset is what a stream's reads and writes return after either side reset it.
var ErrReset = errors.New("stream reset")

// Session is one proved connection to a peer.
type Session interface {
	// Control is the stream for control messages. It exists from the start.
	Control() Stream
	// Open starts a flow stream (host side).
	Open(ctx context.Context) (Stream, error)
	// Accept waits for a flow stream (agent side). It fails when the session ended.
	Accept(ctx context.Context) (Stream, error)
	// Peer says who is at the other end.
	Peer() Peer
	// Done is closed when the session ended.
	Done() <-chan struct{}
	// Close ends the session and all its streams. It may be called more than once.
	Close() error
}

// Peer is what is known of the other end after the handshake.
type Peer struct {
	Identity string // names one life of the peer's process
	Name     string // host name, for people; the peer's word only
	Version  string // build version
	Address  string // transport address
	Proof    string // "token", "uid 0": how it proved itself
}
