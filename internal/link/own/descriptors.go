// SPDX-License-Identifier: Apache-2.0

package own

import "errors"

// Use is what a descriptor is for.
type Use uint8

// The uses. Near the limit of descriptors, those for flows are refused first.
const (
	ForFlow    Use = iota // flows, and listeners at which they begin
	ForLink               // connections of a link, some of which are not flows
	ForControl            // the control socket: never refused, but others make room
)

// ErrDescriptors is returned for a socket that was closed because it had one of the
// last descriptors, which are kept for the link, the control socket and files.
var ErrDescriptors = errors.New("too few file descriptors left: raise the limit (LimitNOFILE, ulimit -n)")

// reserve is how many of limit descriptors are left unused by a use.
func reserve(limit uint64, use Use) uint64 {
	all := min(max(limit/8, 32), 256, limit/2)
	switch use {
	case ForFlow:
		return all
	case ForLink:
		return all / 2
	}
	return all / 4
}
