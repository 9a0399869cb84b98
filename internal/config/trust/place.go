// SPDX-License-Identifier: Apache-2.0

package trust

import (
	"errors"
	"io/fs"
	"os"
)

// Place writes b to f, a new file, closes it, and gives it the name path in one step, so
// that no reader sees half of it, nor does a machine that lost its power. The new name is
// given by name: os.Rename replaces what is there, os.Link does not. Under its own name f
// is gone afterwards.
func Place(f *os.File, b []byte, path string, name func(from, to string) error) (err error) {
	defer func() {
		if rerr := os.Remove(f.Name()); !errors.Is(rerr, fs.ErrNotExist) {
			err = errors.Join(err, rerr)
		}
	}()
	if _, err = f.Write(b); err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	return name(f.Name(), path)
}

// WriteFile replaces a file, atomically, by one that only the process's user can read (on Windows, who can read the directory). A
// file that a killed process left unfinished is removed. It must be in a directory that
// only we write to, and have one writer at a time.
func WriteFile(path string, b []byte) error {
	return ReplaceFile(path, b, func() error { return nil })
}

// ReplaceFile is WriteFile, unless still, which is called when the new file is complete and about
// to take the place of the other one, returns an error.
func ReplaceFile(path string, b []byte, still func() error) error {
	unfinished := path + ".new"
	if err := os.Remove(unfinished); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	f, err := os.OpenFile(unfinished, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	return Place(f, b, path, func(from, to string) error {
		if err := still(); err != nil {
			return err
		}
		return os.Rename(from, to)
	})
}
