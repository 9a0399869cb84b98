// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package forward

import "net"

func pipeLeft() bool { return true }

// toChunks is for systems that move bytes within the kernel; see canSplice.
func (d *direction) toChunks(Stream, *net.TCPConn) (readErr, writeErr error) { return nil, nil }
