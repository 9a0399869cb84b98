// SPDX-License-Identifier: Apache-2.0

//go:build unix

package link

import (
	"fmt"
	"io/fs"
	"os"
	"syscall"
)

// openToken does not wait for a writer where the path is a FIFO.
func openToken(path string) (*os.File, error) {
	return os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
}

// ownedByUs reports whether fi belongs to root or to this process's user.
func ownedByUs(fi fs.FileInfo) (uid uint32, ok bool) {
	st, is := fi.Sys().(*syscall.Stat_t)
	if !is {
		return 0, false
	}
	return st.Uid, st.Uid == 0 || int(st.Uid) == os.Geteuid()
}

func privateFile(path string, fi fs.FileInfo) error {
	if uid, ok := ownedByUs(fi); !ok {
		return fmt.Errorf("%s belongs to uid %d: want uid %d or root", path, uid, os.Geteuid())
	}
	if p := fi.Mode().Perm(); p&0o077 != 0 {
		return fmt.Errorf("%s has mode %04o, others may read it: chmod 600 it, or remove it to have a new one made", path, p)
	}
	return nil
}

func privateDir(path string, fi fs.FileInfo) error {
	if uid, ok := ownedByUs(fi); !ok {
		return fmt.Errorf("directory %s belongs to uid %d: want uid %d or root", path, uid, os.Geteuid())
	}
	if p := fi.Mode().Perm(); p&0o022 != 0 {
		return fmt.Errorf("directory %s has mode %04o, others may write to it: chmod 700 it, or choose another", path, p)
	}
	return nil
}

// restrict has nothing to do: files are made with mode 0600.
func restrict(string) error { return nil }
