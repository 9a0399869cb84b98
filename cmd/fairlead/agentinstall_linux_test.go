// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/config"
	"github.com/fairlead/fairlead/internal/setup/agentinstall"
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

// What starts at boot has none of the shell's variables, which are named if they count.
func TestVariablesThatAreLostAtBoot(t *testing.T) {
	for _, name := range []string{"FAIRLEAD_BIND", "FAIRLEAD_LINK_PIN", "FAIRLEAD_CLIENT_CONTROL", "CATTLE_SERVER", "CATTLE_NODE_NAME", "HTTPS_PROXY", "https_proxy"} {
		t.Setenv(name, "")
	}
	none := filepath.Join(t.TempDir(), "agent.yaml")
	if err := os.WriteFile(none, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct{ variable, link, want string }{
		{"", "wss://hub.example", ""},
		{"FAIRLEAD_LINK_PIN", "vsock://:1023", "FAIRLEAD_LINK_PIN"},
		{"FAIRLEAD_CLIENT_CONTROL", "vsock://:1023", ""},
		{"CATTLE_SERVER", "vsock://:1023", "CATTLE_SERVER"},
		{"CATTLE_NODE_NAME", "vsock://:1023", ""},
		{"HTTPS_PROXY", "vsock://:1023", ""},
		{"HTTPS_PROXY", "wss://hub.example", "HTTPS_PROXY"},
	} {
		if tt.variable != "" {
			t.Setenv(tt.variable, "x")
		}
		_, lost, err := atBoot([]string{"--config", none, "--link", tt.link})
		if err != nil && !errors.Is(err, errNotRoot) {
			t.Fatal(err)
		}
		if got := strings.Join(lost, " "); got != tt.want || (lost.note() == "") != (tt.want == "") || !strings.Contains(lost.note(), tt.want) {
			t.Errorf("%s, %s: lost %q, %q; want %q", tt.variable, tt.link, got, lost.note(), tt.want)
		}
		if tt.variable != "" {
			t.Setenv(tt.variable, "")
		}
	}
	homeOfUser(t)
	t.Setenv("FAIRLEAD_BIND", "all")
	asUser(t, func() {
		if _, _, lost, err := logon(nil); err != nil || strings.Join(lost, " ") != "FAIRLEAD_BIND" {
			t.Errorf("of the host: %q, %v", lost, err)
		}
	})
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
