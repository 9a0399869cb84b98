// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"testing"

	"github.com/fairlead/fairlead/internal/config/yamltree"
)

func FuzzParse(f *testing.F) {
	f.Add([]byte("- name: backup\n  match: {name: web}\n  users: [\"7\"]\n  path: /bin/true\n  user: nobody\n  args: [--all, '/srv/*']\n  env: [LANG]\n" +
		"  sha256: 0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef\n"))
	f.Add([]byte("- {name: x, path: ../x}\n- null\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		n, err := yamltree.Parse("policy", b)
		if err != nil {
			return
		}
		var p Policy
		err = (&yamltree.Decoder{Checks: Checks()}).Decode(n, &p, "entries")
		if err != nil {
			return
		}
		for _, e := range p {
			if e.Name == "" || e.Path == "" || e.Path[0] != '/' || e.User == "" || len(e.SHA256) != 64 {
				t.Errorf("entry %+v", e)
			}
			_ = e.Allows([]string{"--all", "/srv/x"}, []string{"LANG=C"})
		}
	})
}
