// SPDX-License-Identifier: Apache-2.0

//go:build !windows

package host

import "context"

// ReservedPorts returns the ranges of TCP ports that the operating system reserves.
func ReservedPorts(context.Context) ([]PortRange, error) { return nil, nil }
