// SPDX-License-Identifier: Apache-2.0

//go:build unix

package privilege

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

// OfUser reports whether a socket, which may not exist yet, is below a user's directory
// or belongs to another user.
func OfUser(path string) bool {
	if belowUser(path) {
		return true // without a look, which the user could make slow
	}
	resolved, existing := resolve(path)
	if belowUser(resolved) {
		return true
	}
	fi, err := os.Stat(existing)
	if err != nil {
		return false
	}
	st, ok := fi.Sys().(*syscall.Stat_t)
	ours := ok && int(st.Uid) == os.Geteuid()
	// Root owns the directories of everybody, as /run: that says nothing of the socket.
	return ok && !ours && (st.Uid != 0 || existing == resolved)
}

func belowUser(path string) bool {
	return strings.HasPrefix(path, "/home/") || strings.HasPrefix(path, "/run/user/") && !strings.HasPrefix(path, "/run/user/0/")
}

// maxSteps bounds the links and names that resolve follows, as links may form a loop.
const maxSteps = 255

// resolve follows the symbolic links of a path whose last parts may not exist yet. It
// returns the path without links and the part of that which exists, path and "" if there
// are too many links.
func resolve(path string) (resolved, existing string) {
	at, missing := path, ""
	for range maxSteps {
		if p, err := filepath.EvalSymlinks(at); err == nil {
			return filepath.Join(p, missing), p
		}
		to, err := os.Readlink(at)
		switch {
		case err != nil:
			at, missing = filepath.Dir(at), filepath.Join(filepath.Base(at), missing)
		case filepath.IsAbs(to):
			at = to
		default:
			at = filepath.Join(filepath.Dir(at), to)
		}
	}
	return path, ""
}
