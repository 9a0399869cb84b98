// SPDX-License-Identifier: Apache-2.0

// Package link is the authenticated connection between guest agent and host
// peer, over any net.Conn: handshake, proof, control messages, flows, and the
// dialers and listeners for unix and vsock.
package link

import (
	"context"
	"errors"
	"fmt"
	"net"
)

// Stream is one multiplexed stream of a session. Its Close sends what was
// written and an end, and discards what the peer still sends: for some seconds,
// after which the stream is reset. A deadline that passed is
// os.ErrDeadlineExceeded, use after Close net.ErrClosed, the end of the session
// ErrClosed.
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

// Control carries whole control messages, of at most wire.MaxControlFrame bytes. Read and the
// others may be called at the same time.
type Control interface {
	// Read returns the next message, without its header.
	Read(ctx context.Context) ([]byte, error)
	// Write sends a message with its header, within wire.WriteTimeout. When it failed, the
	// session is of no more use.
	Write(ctx context.Context, frame []byte) error
	// Try sends what of a message needs no waiting, and returns the rest. If that is shorter,
	// the next Write must be of it.
	Try(frame []byte) (rest []byte)
}

// Session is one proved connection to a peer.
type Session interface {
	// Control carries control messages. It exists from the start.
	Control() Control
	// Open starts a flow stream (host side).
	Open(ctx context.Context) (Stream, error)
	// Connect starts a flow on a connection of its own (host side), which ends
	// with the session. It is Open where we cannot dial the agent, where dialling
	// fails, and beyond 4,096 such flows. The agent sees the flow with the first
	// write, and has proved itself with the first byte read.
	Connect(ctx context.Context) (Stream, error)
	// Accept waits for a flow of either kind (agent side). It fails when the session ended.
	Accept(ctx context.Context) (Stream, error)
	// Peer describes the other end.
	Peer() Peer
	// Done is closed when the session ended.
	Done() <-chan struct{}
	// Err is why the session ended, nil before. After a close with a reason, on
	// either side, errors.As finds a *CloseError in it.
	Err() error
	// CloseWith ends the session and all its streams and sends the peer the reason.
	// It waits at most a second for the peer to take it. Only the first close counts.
	CloseWith(r Reason) error
	// Close is CloseWith(ReasonShutdown).
	Close() error
}

// Secured is a connection that is encrypted and authenticated below the link, as by
// TLS.
type Secured interface {
	net.Conn
	// Proof is how the peer proved itself, empty if only a token can prove it.
	Proof() string
	// Binding is the same at both ends of this connection and of no other. The proof of
	// the token includes it, so that it proves nothing on a connection behind a relay.
	Binding() []byte
}

// Reason is why a side closed a session. It is sent as yamux's go-away code.
type Reason uint32

// The reasons. yamux itself uses 0 to 2; peers ignore what they do not know.
const (
	ReasonShutdown  Reason = 16 + iota // the process or this side of the link ends
	ReasonReplaced                     // a newer peer took over
	ReasonSilent                       // the peer did not answer in time
	ReasonProtocol                     // the peer violated the protocol
	ReasonDuplicate                    // another agent of the same name is connected
)

// String returns the human-readable reason.
func (r Reason) String() string {
	switch r {
	case 1:
		return "protocol error"
	case 2:
		return "internal error"
	case ReasonShutdown:
		return "shutting down"
	case ReasonReplaced:
		return "a newer peer took over"
	case ReasonSilent:
		return "no answer in time"
	case ReasonProtocol:
		return "protocol violated"
	case ReasonDuplicate:
		return "another agent of this name is connected"
	}
	return fmt.Sprintf("reason %d", uint32(r))
}

// CloseError is the end of a session for a reason that one side gave.
type CloseError struct {
	Reason Reason
	Remote bool // the peer closed it
}

// Error implements error.
func (e *CloseError) Error() string {
	if e.Remote {
		return "session closed by the peer: " + e.Reason.String()
	}
	return "session closed: " + e.Reason.String()
}

// Is makes every CloseError match ErrClosed.
func (e *CloseError) Is(target error) bool { return target == ErrClosed }

// ErrClosed matches every error that comes of the end of the session: by a
// close on either side, a lost connection, or a peer that stopped answering.
var ErrClosed = errors.New("session closed")

// Peer is what is known of the other end after the handshake.
type Peer struct {
	Identity string // names one life of the peer's process
	Name     string // host name, human-readable; not proved
	Version  string // build version
	Address  string // transport address
	Proof    string // how it proved itself: "token", "uid 0"
}
