// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"errors"

	"github.com/fairlead/fairlead/internal/port"
)

// Feed is how a source reports. The registry keeps what each source last reported.
// Methods may be called from any goroutine; calls must be in the order of events.
type Feed interface {
	// Replace reports the complete set, after a dump. It ends staleness.
	Replace(set []port.Binding)
	// Apply reports what one event or one commit changed, as one step.
	Apply(change port.Change)
	// Stale reports that the set may be old, and why. The registry keeps it. The
	// next Replace ends staleness.
	Stale(err error)
	// Warn reports bad data that the source ignores, sorted: an invalid port, a
	// label that is no JSON. The texts are shown, and each is logged when it
	// appears; they do not make the source stale. No texts end all warnings.
	Warn(texts []string)
	// Method names the mechanism in use, for status: "fentry", "poll 1s".
	Method(name string)
	// Lacks reports that there is nothing to observe, and why as its method.
	Lacks(lack port.Lack, why string)
}

// ErrUnusable is in the error of a source that lacks [port.LackSettings].
var ErrUnusable = errors.New("settings that must not be used")
