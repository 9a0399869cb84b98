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
	_, err = f.Write(b)
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	return name(f.Name(), path)
}
