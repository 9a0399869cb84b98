// SPDX-License-Identifier: Apache-2.0

package notify

import (
	"slices"
	"strings"
	"testing"
)

// Title and text are arguments or variables of their own, and the scripts are the same
// whatever they are.
func TestCommands(t *testing.T) {
	const title, text = "fairlead: a port opened", "'; $(reboot) \" `reboot` \nend run"
	linux := commandFor("linux", title, text)
	if linux.program != "notify-send" || !slices.Equal(linux.args, []string{"--app-name=fairlead", "--", title, text}) || len(linux.env) > 0 {
		t.Errorf("Linux: %+v", linux)
	}
	mac := commandFor("darwin", title, text)
	if mac.program != "/usr/bin/osascript" || !slices.Equal(mac.args, slices.Concat(osascript, []string{title, text})) || len(mac.env) > 0 {
		t.Errorf("macOS: %+v", mac)
	}
	windows := commandFor("windows", title, text)
	if windows.program != `WindowsPowerShell\v1.0\powershell.exe` || !slices.Equal(windows.env, []string{titleVariable + "=" + title, textVariable + "=" + text}) {
		t.Errorf("Windows: %+v", windows)
	}
	if n := len(windows.args); windows.args[n-1] != toast || strings.Contains(strings.Join(windows.args, " "), "reboot") || strings.Contains(toast, `"`) {
		t.Errorf("Windows: %q", windows.args)
	}
	for _, want := range []string{"$env:" + titleVariable, "$env:" + textVariable, "CreateTextNode"} {
		if !strings.Contains(toast, want) {
			t.Errorf("the script lacks %s", want)
		}
	}
}
