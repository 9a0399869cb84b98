// SPDX-License-Identifier: Apache-2.0

package nat

import "errors"

// errLost says that notifications were dropped.
var errLost = errors.New("notifications were lost")

// errMany says that a commit has too many changes to be told one by one.
var errMany = errors.New("a commit with many changes")

// errMoved says that the ruleset changed while it was read.
var errMoved = errors.New("the ruleset changed while it was read")

// errAbsent says that the kernel has no nftables.
var errAbsent = errors.New("no nftables in this kernel")

// stream is a socket that receives notifications. next blocks; Close ends it.
type stream interface {
	next() ([]*message, error)
	Close() error
}

// model is what resolving needs to know.
type model interface {
	// ignored tells that a table has no nat base chain.
	ignored(t tableID) bool
	// set returns a set's handle, and whether its elements are known.
	set(t tableID, name string) (handle uint64, elements, ok bool)
}
