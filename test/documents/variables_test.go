// SPDX-License-Identifier: Apache-2.0

package documents

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/config"
)

var variable = regexp.MustCompile(`FAIRLEAD_[A-Z0-9_]+`)

// The variables of tests and scripts are not similar to a setting: agents that inherit them
// would warn of a mistake.
func TestVariablesOfTestsCauseNoWarning(t *testing.T) {
	out, err := exec.Command("git", "-C", root, "ls-files", "Makefile", "hack", "test", "internal/*_test.go", "cmd/*_test.go").Output()
	if err != nil {
		t.Fatal(err)
	}
	seen := make(map[string]bool)
	for path := range strings.Lines(string(out)) {
		path = strings.TrimSpace(path)
		b, err := os.ReadFile(filepath.Join(root, path))
		if err != nil || path == "internal/config/config_test.go" { // which tests the warning
			continue
		}
		for _, name := range variable.FindAllString(string(b), -1) {
			if seen[name] {
				continue
			}
			seen[name] = true
			for _, warning := range config.UnknownVariables([]string{name + "=1"}) {
				t.Errorf("%s: %s", path, warning)
			}
		}
	}
	if len(seen) < 20 {
		t.Errorf("found %d variables", len(seen))
	}
}
