// SPDX-License-Identifier: Apache-2.0

package documents

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// document returns a document, or the part of it below a heading, to the next heading that
// is not lower.
func document(t *testing.T, name, heading string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, name))
	if err != nil {
		t.Fatal(err)
	}
	if heading == "" {
		return string(text)
	}
	_, part, found := strings.Cut(string(text), "\n"+heading+"\n")
	if !found {
		t.Fatalf("%s has no heading %q", name, heading)
	}
	level := strings.Count(heading, "#")
	if next := regexp.MustCompile(`(?m)^#{1,` + string(rune('0'+level)) + `} `).FindStringIndex(part); next != nil {
		part = part[:next[0]]
	}
	return part
}

// What a document has a reader do, in the order in which it is done, whole: without a step
// that is named here the next one fails, or something is left that nobody names.
func TestStepsOfInstallation(t *testing.T) {
	for _, tt := range []struct {
		name, heading, why string
		steps              []string
	}{
		{"docs/linux-vm.md", "## macOS", "an instance that runs cannot be edited", []string{"limactl stop dev", "limactl edit dev"}},
		{"docs/linux-vm.md", "## macOS", "Colima reads it when it starts", []string{"override.yaml", "colima restart"}},
		{"docs/remote.md", "", "host install refuses a guest without a token", []string{"fairlead host pair --guest web1", "fairlead host install -- --listen"}},
		{"docs/remote.md", "## At boot", "a service has no variables of the shell", []string{"systemctl edit fairlead-agent", "/etc/conf.d/fairlead-agent", "Environment=HTTPS_PROXY"}},
		{"docs/install.md", "## Upgrade without a package", "the unit of before lacks what a version needs", []string{"fairlead agent install -- FLAGS", "fairlead host install -- FLAGS"}},
		{"docs/install.md", "## Upgrade without a package", "macOS refuses what a browser downloaded", []string{"| host, macOS |", "xattr -d com.apple.quarantine", "fairlead host install"}},
		{"docs/install.md", "## What uninstalling leaves", "the system forwards nothing else", []string{
			"localhostForwarding=false", "wsl --shutdown", "limactl stop", "portForwards", "limactl edit", "override.yaml", "colima restart",
		}},
	} {
		rest := document(t, tt.name, tt.heading)
		for _, step := range tt.steps {
			_, after, found := strings.Cut(rest, step)
			if !found {
				t.Errorf("%s, %q: no %q after the steps before it: %s", tt.name, tt.heading, step, tt.why)
				break
			}
			rest = after
		}
	}
}

// Who installs has a release, which has no folder deploy.
func TestInstallationNeedsNoRepository(t *testing.T) {
	for _, name := range []string{"README.md", "docs/install.md", "docs/linux-vm.md", "docs/podman.md", "docs/rancher-desktop.md", "docs/remote.md", "docs/wsl.md"} {
		for line := range strings.Lines(document(t, name, "")) {
			if strings.HasPrefix(line, "    ") && strings.Contains(line, "deploy/") {
				t.Errorf("%s: %s", name, line)
			}
		}
		for _, block := range regexp.MustCompile("(?ms)^ *```\n(.*?)^ *```").FindAllStringSubmatch(document(t, name, ""), -1) {
			if strings.Contains(block[1], "deploy/") {
				t.Errorf("%s: %s", name, block[1])
			}
		}
	}
}
