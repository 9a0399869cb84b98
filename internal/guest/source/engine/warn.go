// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/fairlead/fairlead/internal/guest/registry"
)

// Bounds on what an engine's bad data can make us keep.
const (
	maxWarnings    = 100 // texts shown at once
	maxWarningSize = 300 // bytes of one text
)

// Warnings keeps what is wrong with single objects of an engine: a port that
// cannot be, a label that is no JSON. It is not safe for concurrent use.
type Warnings struct {
	Feed registry.Feed

	byObject map[string][]string
	shown    []string
}

// Set states everything that is wrong with one object; no texts, nothing.
func (w *Warnings) Set(object string, texts []string) {
	old := w.byObject[object]
	if slices.Equal(old, texts) {
		return
	}
	for i, t := range texts {
		if len(t) > maxWarningSize {
			texts[i] = strings.ToValidUTF8(t[:maxWarningSize], "") + "..."
		}
	}
	if w.byObject == nil {
		w.byObject = make(map[string][]string)
	}
	if len(texts) == 0 {
		delete(w.byObject, object)
	} else {
		w.byObject[object] = texts
	}
	w.show()
}

// Clear ends all warnings.
func (w *Warnings) Clear() {
	w.byObject = nil
	w.show()
}

func (w *Warnings) show() {
	var all []string
	for _, object := range slices.Sorted(maps.Keys(w.byObject)) {
		all = append(all, w.byObject[object]...)
	}
	if n := len(all); n > maxWarnings {
		all = append(all[:maxWarnings:maxWarnings], "and "+strconv.Itoa(n-maxWarnings)+" more")
	}
	if slices.Equal(all, w.shown) {
		return
	}
	w.shown = all
	w.Feed.Warn(slices.Clone(all))
}
