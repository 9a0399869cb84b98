// SPDX-License-Identifier: Apache-2.0

//go:build !unix

package forward

import "net"

// Readable waits until a socket has something to read. Without poll(2) it
// returns at once.
func Readable(net.Conn) func() error { return func() error { return nil } }
