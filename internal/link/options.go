// SPDX-License-Identifier: Apache-2.0

package link

import (
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/fairlead/fairlead/internal/link/own"
	"github.com/fairlead/fairlead/internal/link/wire"
	"github.com/fairlead/fairlead/internal/port"
)

// Role is which end of the link a peer is, independent of which dials.
type Role = wire.Role

// The roles. A link joins one of each.
const (
	RoleAgent = wire.RoleAgent
	RoleHost  = wire.RoleHost
)

// Options configures one side of a link. Role, Identity and Logger are required.
type Options struct {
	// Role is this side's. The host opens flow streams, the agent accepts them.
	Role Role
	// Identity names one life of this process, at most 64 bytes; see NewIdentity.
	Identity string
	// Name is the host name, at most 256 bytes, and Version the build version, at
	// most 64 bytes. They are only shown.
	Name, Version string
	// Network, if not empty, is where this side's ports are, at most 64 bytes; see
	// NetworkID. A peer with the same is refused: each side would publish what the
	// other one opened.
	Network string
	// Token, if not zero, must be proved by the peer, and is proved to it.
	// Required on vsock and wherever the peer's user cannot be known.
	Token Token
	// LoadToken, if not nil, is called for each handshake and returns the token to
	// use instead, so that it can be made or replaced while we run.
	LoadToken func() (Token, error)
	// AllowUIDs are the users besides root and our own that may be at the other
	// end of a unix socket.
	AllowUIDs []uint32
	// AllowCIDs are the vsock contexts that a listener takes connections from;
	// {CIDHost} if empty. On a host that listens, the guests' ids.
	AllowCIDs []uint32
	// HandshakeTimeout bounds one handshake; 5 s if 0.
	HandshakeTimeout time.Duration
	// MaxHandshakes is how many handshakes a listener runs at once; 16 if 0. Beyond
	// it the oldest is aborted for the newest, so that silent peers block no others.
	MaxHandshakes int
	// MaxStreams is how many flow streams an agent has at once, and how many
	// connections that are one flow; 10,496 each if 0. The next is reset. A stream
	// can hold 256 KiB of unread data.
	MaxStreams int
	// KeepAlive is how long a session may be without traffic before the peer
	// must answer a ping within 30 s; 30 s if 0.
	KeepAlive time.Duration
	Logger    *slog.Logger

	version     int           // wire.Version if 0
	maxUnproved int           // connections that have sent no opening yet; unprovedLimit if 0
	openingTime time.Duration // the constant if 0
}

// NewIdentity returns a random identity. A process makes one and keeps it.
func NewIdentity() string { return rand.Text() }

func (o Options) withDefaults() Options {
	if o.HandshakeTimeout == 0 {
		o.HandshakeTimeout = 5 * time.Second
	}
	if o.MaxHandshakes == 0 {
		o.MaxHandshakes = 16
	}
	if o.openingTime == 0 {
		o.openingTime = openingTime
	}
	if o.maxUnproved == 0 {
		o.maxUnproved = unprovedLimit(own.Descriptors())
	}
	if o.MaxStreams == 0 {
		o.MaxStreams = 10_240 + 256
	}
	if o.KeepAlive == 0 {
		o.KeepAlive = 30 * time.Second
	}
	if len(o.AllowCIDs) == 0 {
		o.AllowCIDs = []uint32{CIDHost}
	}
	if o.version == 0 {
		o.version = wire.Version
	}
	return o
}

// unprovedLimit is how many connections may wait for their opening at once, for a limit
// of file descriptors (0 is none). So few that the oldest is closed before new ones are
// refused because descriptors are scarce.
func unprovedLimit(descriptors uint64) int {
	if descriptors == 0 {
		return 1024
	}
	return int(max(1, min(1024, descriptors/4)))
}

// complete checks the options and fills in what has a default.
func (o Options) complete() (Options, error) {
	switch {
	case o.Role != RoleAgent && o.Role != RoleHost:
		return o, fmt.Errorf("link options: Role %q: want %q or %q", o.Role, RoleAgent, RoleHost)
	case o.Identity == "" || len(o.Identity) > port.MaxWord:
		return o, fmt.Errorf("link options: Identity of %d bytes: want 1 to %d, see NewIdentity", len(o.Identity), port.MaxWord)
	case len(o.Name) > port.MaxName:
		return o, fmt.Errorf("link options: Name of %d bytes: want at most %d", len(o.Name), port.MaxName)
	case len(o.Version) > port.MaxWord:
		return o, fmt.Errorf("link options: Version of %d bytes: want at most %d", len(o.Version), port.MaxWord)
	case len(o.Network) > port.MaxWord:
		return o, fmt.Errorf("link options: Network of %d bytes: want at most %d", len(o.Network), port.MaxWord)
	case o.HandshakeTimeout < 0 || o.MaxHandshakes < 0 || o.MaxStreams < 0 || o.KeepAlive < 0:
		return o, errors.New("link options: a duration or limit is negative: want 0 for the default, or more")
	case o.KeepAlive > 0 && o.KeepAlive < time.Second:
		return o, fmt.Errorf("link options: KeepAlive %s: want 1s or more", o.KeepAlive)
	case o.Logger == nil:
		return o, errors.New("link options: no Logger")
	}
	return o.withDefaults(), nil
}

// completeFor also checks what the endpoint demands.
func (o Options) completeFor(e Endpoint) (Options, error) {
	if err := e.check(); err != nil {
		return o, fmt.Errorf("link: %w", err)
	}
	if e.Network != NetworkUnix && o.Token.IsZero() && o.LoadToken == nil {
		return o, fmt.Errorf("link %s: vsock needs a token on both sides: any process may hold a port; give both the same token file", e)
	}
	return o.complete()
}

// withToken returns o with the current token.
func (o Options) withToken() (Options, error) {
	if o.LoadToken == nil {
		return o, nil
	}
	t, err := o.LoadToken()
	if err != nil {
		return o, &RefusedError{Code: RefusedToken, Detail: "this side's token cannot be read", Err: err}
	}
	o.Token = t
	return o, nil
}
