// SPDX-License-Identifier: Apache-2.0

package documents

import (
	"io/fs"
	"os"
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
	seen := make(map[string]bool)
	for _, top := range []string{"Makefile", "hack", "test", "internal", "cmd"} {
		err := filepath.WalkDir(filepath.Join(root, top), func(path string, d fs.DirEntry, err error) error {
			test := strings.HasSuffix(path, "_test.go") || top != "internal" && top != "cmd"
			if err != nil || !d.Type().IsRegular() || !test || filepath.Base(path) == "config_test.go" { // which tests the warning
				return err
			}
			b, err := os.ReadFile(path)
			for _, name := range variable.FindAllString(string(b), -1) {
				if seen[name] {
					continue
				}
				seen[name] = true
				for _, warning := range config.UnknownVariables([]string{name + "=1"}) {
					t.Errorf("%s: %s", path, warning)
				}
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if len(seen) < 20 {
		t.Errorf("found %d variables", len(seen))
	}
}
