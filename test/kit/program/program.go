// SPDX-License-Identifier: Apache-2.0

// Package program gives tests the fairlead binary, and runs it and other programs for them:
// it keeps their output, and leaves none behind.
package program

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

// Variable names the binary where there is no compiler, as inside a VM.
const Variable = "FAIRLEAD_PROGRAM"

// Path returns the binary that the environment names, or builds it in dir.
func Path(dir string) (string, error) {
	if path := os.Getenv(Variable); path != "" {
		return path, nil
	}
	path := filepath.Join(dir, "fairlead")
	out, err := exec.Command("go", "build", "-tags", "grpcnotrace", "-o", path, "github.com/fairlead/fairlead/cmd/fairlead").CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("build the program under test: %w: %s", err, out)
	}
	return path, nil
}
