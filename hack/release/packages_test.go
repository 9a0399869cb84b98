// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Debian's zsh reads completions of packages from a directory of its own.
func TestCompletionOfZsh(t *testing.T) {
	for _, f := range []struct {
		form form
		want string
	}{
		{form{"deb", true}, "/usr/share/zsh/vendor-completions/_fairlead"},
		{form{"rpm", true}, "/usr/share/zsh/site-functions/_fairlead"},
		{form{"apk", false}, "/usr/share/zsh/site-functions/_fairlead"},
	} {
		r := &release{repo: "../..", work: t.TempDir()}
		if err := os.Mkdir(filepath.Join(r.work, "man"), 0o755); err != nil {
			t.Fatal(err)
		}
		list, err := r.contents("fairlead", f.form)
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, c := range list {
			if strings.Contains(c.Destination, "zsh") {
				got = append(got, c.Destination)
			}
		}
		if len(got) != 1 || got[0] != f.want {
			t.Errorf("%s: %q, want %s", f.form.name, got, f.want)
		}
	}
}
