// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package forward

import "net"

// awaitReset is for kernels that report a reset after the end was read.
func awaitReset(net.Conn) error { return nil }

// hungUp is for kernels whose reads report a reset that a write has got.
func hungUp(net.Conn) bool { return false }

// lost is for kernels whose writes are not watched.
func lost(net.Conn) error { return nil }

// peerClosed is like lost.
func peerClosed(net.Conn) bool { return false }
