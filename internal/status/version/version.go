// SPDX-License-Identifier: Apache-2.0

// Package version reports the version of this binary.
package version

import "runtime/debug"

// release is set by the linker when a release is built, from its tag.
var release string

// String returns the version of the release, the module version, or the revision it was built from, or "devel".
func String() string {
	if release != "" {
		return release
	}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "devel"
	}
	if v := info.Main.Version; v != "" && v != "(devel)" {
		return v
	}
	revision, dirty := "devel", ""
	for _, s := range info.Settings {
		switch s.Key {
		case "vcs.revision":
			revision = s.Value[:min(12, len(s.Value))]
		case "vcs.modified":
			if s.Value == "true" {
				dirty = "+dirty"
			}
		}
	}
	return revision + dirty
}
