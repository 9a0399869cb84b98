// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"context"
	"errors"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/table"
)

// View is the wanted set at one generation: every publication in it is allowed.
type View = table.View[port.Key, port.Publication]

// Change names the keys that may differ between two views.
type Change = table.Change[port.Key]

// ErrPending is for a Sync that must be retried although nothing failed: keys
// without an outcome keep the one that they have.
var ErrPending = errors.New("outcomes are pending")

// Sink publishes a wanted set.
type Sink interface {
	Name() string
	// Sync makes what is published equal to want. It is idempotent and
	// level-triggered: change is a hint that lets a sink do O(change) work; want
	// alone counts. Base 0 means that nothing was synced before. It returns the
	// outcomes of the keys about which it has news, and an error if Sync must be
	// retried; ctx has a deadline. An error fails changed keys without an outcome,
	// unless it is ErrPending.
	Sync(ctx context.Context, want View, change Change) (port.Outcomes, error)
	// Wake receives when something outside changed and Sync should run again with
	// the same view. It may be nil.
	Wake() <-chan struct{}
}
