// SPDX-License-Identifier: Apache-2.0

package status

import (
	"os"
	"path/filepath"
	"testing"
)

// Between bind and chmod no other user can connect.
func TestControlSocketIsPrivateFromTheStart(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	l, err := bindPrivate(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	fi, err := os.Stat(path)
	if err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", fi.Mode(), err)
	}
}
