// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"net"
	"os"
)

// Access opens the socket of an engine.
type Access interface {
	// Check returns why the socket must not be used. An absent one is an [fs.ErrNotExist].
	Check() error
	// Dial checks and connects, by connect.
	Dial(ctx context.Context, connect Connect) (net.Conn, error)
}

// Connect is like the DialContext of [net.Dialer].
type Connect func(ctx context.Context, network, address string) (net.Conn, error)

// Path is a socket whose path is trusted.
type Path string

// Check implements Access.
func (p Path) Check() error {
	_, err := os.Stat(string(p))
	return err
}

// Dial implements Access.
func (p Path) Dial(ctx context.Context, connect Connect) (net.Conn, error) {
	return connect(ctx, "unix", string(p))
}
