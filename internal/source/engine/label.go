// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"maps"
	"slices"
	"strings"
)

// Bounds on the labels that an owner carries: they cross the link with each
// publication.
const (
	maxLabels    = 64
	maxLabelSize = 256 // bytes of key and value together
)

// Labels returns the labels that an owner keeps, in a map of its own: those of
// people and of Compose, not an engine's private notes, whose prefixes are given.
// What is too long is left out, never cut.
func Labels(all map[string]string, private ...string) map[string]string {
	out := make(map[string]string)
next:
	for _, k := range slices.Sorted(maps.Keys(all)) {
		if len(out) == maxLabels || len(k)+len(all[k]) > maxLabelSize {
			continue
		}
		for _, p := range private {
			if strings.HasPrefix(k, p) {
				continue next
			}
		}
		out[k] = all[k]
	}
	if len(out) == 0 {
		return nil
	}
	return out
}
