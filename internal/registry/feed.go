// SPDX-License-Identifier: Apache-2.0

package registry

import "github.com/fairlead/fairlead/internal/port"

// Feed is all that a source may say. The registry keeps what each source last
// said. Methods may be called from any goroutine, in the order that is true.
type Feed interface {
	// Replace states the complete set, after a dump. It ends staleness.
	Replace(set []port.Binding)
	// Apply states what one event or one commit changed, as one step.
	Apply(change port.Change)
	// Stale says that what stands may be old, and why; it stays. The next
	// Replace ends it.
	Stale(err error)
	// Warn states what the source could not use of what it was told, sorted: a
	// port that cannot be, a label that is no JSON. The texts are shown and each
	// is logged once while it stands; the source is not stale for them. No texts
	// end all warnings.
	Warn(texts []string)
	// Method names the mechanism in use, for status: "fentry", "poll 1s".
	Method(name string)
}
