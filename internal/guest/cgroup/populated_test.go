// SPDX-License-Identifier: Apache-2.0

package cgroup

import (
	"os"
	"path/filepath"
	"testing"
)

func TestPopulated(t *testing.T) {
	for name, c := range map[string]struct {
		files map[string]string
		want  bool
	}{
		"a process":                   {map[string]string{"cgroup.events": "populated 1\nfrozen 0\n"}, true},
		"frozen":                      {map[string]string{"cgroup.events": "populated 1\nfrozen 1\n"}, true},
		"no process":                  {map[string]string{"cgroup.events": "populated 0\nfrozen 1\n", "cgroup.procs": ""}, false},
		"v1, a process":               {map[string]string{"cgroup.procs": "7\n"}, true},
		"v1, a process further below": {map[string]string{"cgroup.procs": "", "a/b/cgroup.procs": "7\n"}, true},
		"v1, no process":              {map[string]string{"cgroup.procs": "", "a/cgroup.procs": ""}, false},
		"nothing":                     {nil, false},
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "cgroup")
			for file, text := range c.files {
				path := filepath.Join(dir, file)
				if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			if got := Populated(dir); got != c.want {
				t.Errorf("Populated = %t, want %t", got, c.want)
			}
		})
	}
}
