// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/config"
	"github.com/fairlead/fairlead/internal/setup/hostinstall"
)

// What is printed after an installation names the log that will be written: that of a flag,
// of host.yaml, or of this system.
func TestInstalledNamesTheLog(t *testing.T) {
	for _, c := range []struct {
		args []string
		file string // of the configuration
		want string
	}{
		{[]string{"host"}, "", "Log: journalctl --user -u fairlead-host\n"},
		{[]string{"host"}, `C:\logs\f.log`, "Log: C:\\logs\\f.log\n"},
		{[]string{"host", "--log-file=/l/f"}, "/l/f", "Log: /l/f\n"},
		{[]string{"host", "--log-file", "/x/host.log"}, "", "Log: /x/host.log\n"},
	} {
		if got := installed(hostinstall.Logon{Args: c.args}, config.Host{LogFile: c.file}); !strings.Contains(got, c.want) {
			t.Errorf("%q, %q: %s", c.args, c.file, got)
		}
	}
}
