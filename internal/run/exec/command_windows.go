// SPDX-License-Identifier: Apache-2.0

package exec

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"unicode/utf8"

	"golang.org/x/sys/windows"
)

// commandLine joins a program's path and arguments as programs take them apart that use
// Microsoft's C library, CommandLineToArgvW or Go. All are quoted: some libraries split at more
// than spaces and tabs, or take * for names of files.
func commandLine(path string, args []string) (*uint16, error) {
	line := `"` + path + `"` // no path has a quote
	for _, a := range args {
		if !utf8.ValidString(a) {
			return nil, fmt.Errorf("argument %q is not UTF-8", a)
		}
		quoted := windows.EscapeArg(" " + a) // the space has it quoted
		line += ` "` + quoted[len(`" `):]
	}
	text, err := windows.UTF16PtrFromString(line)
	if err != nil {
		return nil, fmt.Errorf("arguments %q: a NUL cannot be passed", args)
	}
	return text, nil
}

// kept are the variables that each program gets of those that the system gives this process's
// user. They are not this process's own, which may have anything.
var kept = []string{"APPDATA", "LOCALAPPDATA", "SystemDrive", "SystemRoot", "TEMP", "TMP", "USERNAME", "USERPROFILE"}

// loading begin the names of variables by which other code than the program's is run.
var loading = []string{"COMPLUS_", "COR_", "CORECLR_", "DOTNET_", "__COMPAT_LAYER"}

// environment returns what a program has with these variables ("KEY=VALUE") of the client.
func environment(client []string) ([]string, error) {
	system, err := windows.GetCurrentProcessToken().Environ(false)
	if err != nil {
		return nil, fmt.Errorf("read the user's environment: %w", err)
	}
	root, err := windows.GetSystemWindowsDirectory()
	if err != nil {
		return nil, err
	}
	// Libraries are also searched for in PATH.
	all := map[string]string{"PATH": "PATH=" + root + `\System32;` + root}
	for _, v := range system {
		if key, _, _ := strings.Cut(v, "="); slices.ContainsFunc(kept, func(k string) bool { return strings.EqualFold(k, key) }) {
			all[strings.ToUpper(key)] = v
		}
	}
	for _, v := range client {
		if err := add(all, v); err != nil {
			return nil, err
		}
	}
	env := make([]string, 0, len(all))
	for _, key := range slices.Sorted(maps.Keys(all)) {
		env = append(env, all[key])
	}
	return env, nil
}

// add adds a variable of the client. Names that differ in case only are the same.
func add(all map[string]string, v string) error {
	key, _, ok := strings.Cut(v, "=")
	upper := strings.ToUpper(key)
	switch {
	case !ok || key == "" || !utf8.ValidString(v) || strings.ContainsRune(v, 0):
		return fmt.Errorf(`variable %q: want KEY=VALUE in UTF-8 without a NUL`, v)
	case all[upper] != "":
		return fmt.Errorf("variable %q: fairlead sets it, or it comes twice", key)
	case slices.ContainsFunc(loading, func(p string) bool { return strings.HasPrefix(upper, p) }):
		return fmt.Errorf("variable %q: the system reads it: a client could run other code", key)
	}
	all[upper] = v
	return nil
}

// environmentBlock is the form in which CreateProcess takes an environment.
func environmentBlock(env []string) ([]uint16, error) {
	var block []uint16
	for _, v := range env {
		text, err := windows.UTF16FromString(v)
		if err != nil {
			return nil, fmt.Errorf("variable %q: %w", v, err)
		}
		block = append(block, text...)
	}
	return append(block, 0), nil
}
