// SPDX-License-Identifier: Apache-2.0

package config

import (
	"cmp"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
)

// hostDirs are the directories of the host peer's files, each empty if it is not known.
type hostDirs struct {
	config  string // host.yaml
	state   string // token
	runtime string // control socket
}

// systemDirs are those of a host peer that root runs on Linux.
func systemDirs() hostDirs {
	return hostDirs{config: "/etc/fairlead", state: "/var/lib/fairlead", runtime: "/run/fairlead"}
}

// currentDirs are those of this process's user: of the system for root on Linux, of
// the XDG base directories for others there, the configuration directory elsewhere.
func currentDirs() hostDirs {
	if runtime.GOOS == "linux" {
		if os.Geteuid() == 0 {
			return systemDirs()
		}
		return xdgDirs(os.Getenv, os.Geteuid(), ownedBy)
	}
	dir := ""
	if base, err := os.UserConfigDir(); err == nil {
		dir = filepath.Join(base, "fairlead")
	}
	return hostDirs{dir, dir, dir}
}

// xdgDirs are those of a user by the XDG Base Directory Specification, which ignores
// relative paths, and runtime directories of other users, as su and sudo leave them in the
// environment. Where there is no runtime directory the state directory is used.
func xdgDirs(env func(string) string, uid int, owned func(dir string, uid int) bool) hostDirs {
	base := func(variable, inHome string) string {
		if dir := env(variable); filepath.IsAbs(dir) {
			return filepath.Join(dir, "fairlead")
		}
		if home := env("HOME"); inHome != "" && filepath.IsAbs(home) {
			return filepath.Join(home, inHome, "fairlead")
		}
		return ""
	}
	d := hostDirs{config: base("XDG_CONFIG_HOME", ".config"), state: base("XDG_STATE_HOME", ".local/state")}
	// The second is that of systemd's logind.
	for _, dir := range []string{env("XDG_RUNTIME_DIR"), filepath.Join("/run/user", strconv.Itoa(uid))} {
		if d.runtime == "" && filepath.IsAbs(dir) && owned(dir, uid) {
			d.runtime = filepath.Join(dir, "fairlead")
		}
	}
	d.runtime = cmp.Or(d.runtime, d.state)
	return d
}

// in returns a file of the directory, or "" if that is not known.
func in(dir, name string) string {
	if dir == "" {
		return ""
	}
	return filepath.Join(dir, name)
}
