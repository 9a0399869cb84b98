// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/agentinstall"
	"github.com/fairlead/fairlead/internal/config"
)

func TestAgentUninstalledSaysWhatRuns(t *testing.T) {
	for want, r := range map[string]agentinstall.Removed{
		"Nothing to uninstall":                                                   {},
		"Uninstalled. Configuration":                                             {Found: true},
		"ended the agent, process 7. Configuration":                              {Found: true, Ended: 7},
		"runs until `wsl --shutdown` in Windows: it did not end.\nConfiguration": {Found: true, Runs: errors.New("it did not end")},
	} {
		if got := agentUninstalled(r); !strings.Contains(got, want) {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

// The control socket is that of the agent that was installed, also where its configuration
// has a mistake now.
func TestControlOfAnInstalledAgent(t *testing.T) {
	dir := t.TempDir()
	bad, good := filepath.Join(dir, "bad.yaml"), filepath.Join(dir, "good.yaml")
	if err := errors.Join(os.WriteFile(bad, []byte("no: such\n"), 0o600), os.WriteFile(good, []byte("control: /y\n"), 0o600)); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		flags []string
		want  string
	}{
		{[]string{"--control=/x"}, "/x"},
		{[]string{"--config", good}, "/y"},
		{[]string{"--config", bad}, config.DefaultAgent().Control},
		{[]string{"--no-such-flag"}, config.DefaultAgent().Control},
	} {
		if got := controlOf(tt.flags); got != tt.want {
			t.Errorf("%q: %s, want %s", tt.flags, got, tt.want)
		}
	}
}
