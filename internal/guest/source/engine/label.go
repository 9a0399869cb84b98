// SPDX-License-Identifier: Apache-2.0

package engine

import "strings"

// Labels returns the labels that an owner has, in a map of its own: those of
// people and of Compose, not an engine's private ones, whose prefixes are given.
// None is left out for its size, because rules must see them all. What shows
// labels to others limits them.
func Labels(all map[string]string, private ...string) map[string]string {
	if len(all) == 0 {
		return nil
	}
	out := make(map[string]string, len(all))
next:
	for k, v := range all {
		for _, p := range private {
			if strings.HasPrefix(k, p) {
				continue next
			}
		}
		out[k] = v
	}
	if len(out) == 0 {
		return nil
	}
	return out
}
