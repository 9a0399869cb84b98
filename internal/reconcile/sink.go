// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"context"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/table"
)

// View is the wanted set at one generation: every publication in it is allowed.
type View = table.View[port.Key, port.Publication]

// Change names the keys that may differ between two views.
type Change = table.Change[port.Key]

// Sink makes the outside equal to a wanted set.
type Sink interface {
	Name() string
	// Sync makes the outside equal to want. It is idempotent and level-triggered:
	// change is a hint that lets a sink do O(change) work, and want alone is the
	// truth. Base 0 means that nothing was synced before. It returns the outcomes
	// of the keys it knows more about, and an error if the whole must be tried
	// again; ctx carries a deadline.
	Sync(ctx context.Context, want View, change Change) (port.Outcomes, error)
	// Wake receives when something outside changed, so that Sync should run
	// again with the same view. It may be nil.
	Wake() <-chan struct{}
}
