// SPDX-License-Identifier: Apache-2.0

package config

import (
	"path/filepath"
	"testing"
)

func TestXDGDirs(t *testing.T) {
	const noUser = 1<<31 - 2 // has no /run/user
	all := map[string]string{"HOME": "/h", "XDG_CONFIG_HOME": "/c", "XDG_STATE_HOME": "/s", "XDG_RUNTIME_DIR": "/r"}
	for _, c := range []struct {
		name string
		env  map[string]string
		want hostDirs
	}{
		{"all set", all, hostDirs{"/c/fairlead", "/s/fairlead", "/r/fairlead"}},
		{"home only", map[string]string{"HOME": "/h"}, hostDirs{"/h/.config/fairlead", "/h/.local/state/fairlead", "/h/.local/state/fairlead"}},
		{"relative", map[string]string{"HOME": "/h", "XDG_CONFIG_HOME": "c", "XDG_STATE_HOME": "", "XDG_RUNTIME_DIR": "r"},
			hostDirs{"/h/.config/fairlead", "/h/.local/state/fairlead", "/h/.local/state/fairlead"}},
		{"nothing", nil, hostDirs{}},
		{"runtime directory of another user", map[string]string{"HOME": "/h", "XDG_RUNTIME_DIR": "/theirs"},
			hostDirs{"/h/.config/fairlead", "/h/.local/state/fairlead", "/h/.local/state/fairlead"}},
		{"that of logind instead", map[string]string{"HOME": "/h", "XDG_RUNTIME_DIR": "/theirs", "LOGIND": "1"},
			hostDirs{"/h/.config/fairlead", "/h/.local/state/fairlead", "/run/user/2147483646/fairlead"}},
	} {
		owned := func(dir string, uid int) bool {
			return uid == noUser && (dir == "/r" || c.env["LOGIND"] != "" && dir != "/theirs")
		}
		if got := xdgDirs(func(k string) string { return c.env[k] }, noUser, owned); got != c.want {
			t.Errorf("%s: %+v, want %+v", c.name, got, c.want)
		}
	}
	h := defaultHost(xdgDirs(func(k string) string { return all[k] }, noUser, func(string, int) bool { return true }))
	if h.LinkToken != "/s/fairlead/token" || h.Control != "/r/fairlead/host.sock" {
		t.Errorf("token %s, control socket %s", h.LinkToken, h.Control)
	}
	if in("", "token") != "" || in("/a", "b") != filepath.Join("/a", "b") {
		t.Error("in")
	}
}
