// SPDX-License-Identifier: Apache-2.0

// Package watch reads NAT rulesets from a network namespace and streams their
// changes: dumps at one generation, commits by nfnetlink, tables of
// iptables-legacy, and the links and routes that rules depend on.
package watch

import (
	"errors"
	"syscall"

	"github.com/fairlead/fairlead/internal/guest/source/nat/ruleset"
)

// ErrLost means that notifications were lost.
var ErrLost = errors.New("notifications were lost")

// ErrMoved means that the ruleset changed while it was read.
var ErrMoved = errors.New("the ruleset changed while it was read")

// ErrAbsent means that the kernel has no nftables.
var ErrAbsent = errors.New("no nftables in this kernel")

// Stream receives notifications. Next blocks, and may be called again after ErrLost; Close
// ends it.
type Stream interface {
	Next() ([]*ruleset.Message, error)
	Close() error
	// Filtered reports whether a filter leaves out what concerns neither tables, nor chains,
	// nor a table with a chain at a nat hook in the last dump.
	Filtered() bool
	// Passed returns the generation of the last commit that the filter let pass in part or
	// whole, 0 if none.
	Passed() (generation uint32, err error)
}

// Filter leaves out notifications that do not concern NAT, in the kernel. One Kernel at a
// time uses it.
type Filter interface {
	Close() error
	// attach attaches the filter to a socket.
	attach(socket syscall.Conn) error
	// follow lets pass what changes these tables from now on.
	follow(tables []*ruleset.Table) error
	// passed returns the generation of the last commit of which something passed, 0 if none.
	passed() (generation uint32, err error)
}

// Methods for nftables, best first.
const (
	MethodNetlink    = "nfnetlink"  // the kernel's own notifications
	MethodGeneration = "generation" // the number of the last commit is polled
)
