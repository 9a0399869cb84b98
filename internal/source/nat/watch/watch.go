// SPDX-License-Identifier: Apache-2.0

// Package watch reads NAT rulesets from a network namespace and streams their
// changes: dumps at one generation, commits by nfnetlink or by hooks, tables of
// iptables-legacy, and the links and routes that rules depend on.
package watch

import (
	"errors"

	"github.com/fairlead/fairlead/internal/source/nat/ruleset"
)

// ErrLost means that notifications were lost.
var ErrLost = errors.New("notifications were lost")

// ErrMany means that a commit has too many changes to be reported one by one.
var ErrMany = errors.New("a commit with many changes")

// ErrMoved means that the ruleset changed while it was read.
var ErrMoved = errors.New("the ruleset changed while it was read")

// ErrAbsent means that the kernel has no nftables.
var ErrAbsent = errors.New("no nftables in this kernel")

// Stream receives notifications. Next blocks, and may be called again after ErrLost and
// ErrMany; Close ends it.
type Stream interface {
	Next() ([]*ruleset.Message, error)
	Close() error
	// Reported returns the generation of the last commit that was reported, and of the
	// last that has ended, 0 if none. A commit can be read before it has ended. sparse
	// is false if all commits are reported.
	Reported() (reported, ended uint32, sparse bool, err error)
}

// Known is what Resolve needs to know of the model.
type Known interface {
	// Ignored reports whether a table has no chain at a nat hook.
	Ignored(t ruleset.TableID) bool
	// Set returns the handles of a set and its table, and whether the elements are
	// known. They are 0 if the set is not known.
	Set(t ruleset.TableID, name string) (table, handle uint64, elements bool)
}

// Methods for nftables, best first; docs/nat.md has the measurements.
const (
	MethodNetlink    = "nfnetlink"  // the kernel's own notifications
	MethodFentry     = "fentry"     // hooks in the kernel, by BPF trampolines
	MethodKprobe     = "kprobe"     // the same hooks, by kprobes
	MethodGeneration = "generation" // the number of the last commit is polled
)
