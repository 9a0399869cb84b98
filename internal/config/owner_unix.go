// SPDX-License-Identifier: Apache-2.0

//go:build unix

package config

import (
	"os"
	"syscall"
)

// ownedBy reports whether dir is a directory of the user.
func ownedBy(dir string, uid int) bool {
	fi, err := os.Stat(dir)
	if err != nil || !fi.IsDir() {
		return false
	}
	st, ok := fi.Sys().(*syscall.Stat_t)
	return ok && int(st.Uid) == uid
}
