// SPDX-License-Identifier: Apache-2.0

//go:build unix

package privilege

import (
	"os"
	"path/filepath"
	"testing"
)

// A socket is a user's also before it exists, and behind symbolic links.
func TestSocketOfAUser(t *testing.T) {
	dir := t.TempDir()
	link := func(to, name string) string {
		t.Helper()
		name = filepath.Join(dir, name)
		if err := os.Symlink(to, name); err != nil {
			t.Fatal(err)
		}
		return name
	}
	loop := link("loop", "loop")
	cases := map[string]bool{
		"/run/user/77777/docker.sock":                        true,
		"/run/user/0/docker.sock":                            false,
		"/home/nobody-here/docker.sock":                      true,
		dir + "/docker.sock":                                 false,
		dir + "/none/docker.sock":                            false,
		link("/run", "var-run") + "/user/77777/docker.sock":  true,
		link("/run/user/77777/docker.sock", "dangling.sock"): true,
		link("var-run/user/77777/d.sock", "relative.sock"):   true,
		link("/run/user/0/docker.sock", "root.sock"):         false,
		loop:             false,
		loop + "/a.sock": false,
		"":               false,
	}
	if os.Geteuid() == 0 { // only root makes files of others
		theirs := filepath.Join(dir, "theirs")
		if err := os.Mkdir(theirs, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.Chown(theirs, 1000, 1000); err != nil {
			t.Fatal(err)
		}
		cases[theirs+"/sub/docker.sock"] = true
		cases[link("theirs", "to-theirs")+"/docker.sock"] = true
	}
	for path, want := range cases {
		if got := OfUser(path); got != want {
			t.Errorf("%q is of a user: %v, want %v", path, got, want)
		}
	}
}
