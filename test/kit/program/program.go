// SPDX-License-Identifier: Apache-2.0

// Package program gives tests the fairlead binary, and runs it and other programs for them:
// it keeps their output, and leaves none behind.
package program

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// Variable names the binary where there is no compiler, as inside a VM.
const Variable = "FAIRLEAD_PROGRAM"

// Path returns the binary that the environment names, or builds it in dir.
func Path(dir string) (string, error) {
	if path := os.Getenv(Variable); path != "" {
		return path, nil
	}
	path := filepath.Join(dir, "fairlead")
	if err := Build("fairlead", path); err != nil {
		return "", err
	}
	return path, nil
}

// RunVariable is Variable for fairlead-run.
const RunVariable = "FAIRLEAD_RUN_PROGRAM"

// RunPath is Path for fairlead-run.
func RunPath(dir string) (string, error) {
	if path := os.Getenv(RunVariable); path != "" {
		return path, nil
	}
	path := filepath.Join(dir, "fairlead-run")
	return path, Build("fairlead-run", path)
}

// Build builds a command of cmd/ as releases are: without cgo, so that it runs in any container.
func Build(command, path string) error {
	path, err := filepath.Abs(path)
	if err != nil {
		return err
	}
	build := exec.Command("go", "build", "-tags", "grpcnotrace", "-o", path, "./cmd/"+command)
	if build.Dir, err = Root(); err != nil {
		return err
	}
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("build %s: %w: %s", command, err, out)
	}
	return nil
}

// Root returns the directory of the repository, anywhere in it.
func Root() (string, error) {
	dir, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "github.com/fairlead/fairlead").Output()
	if err != nil {
		return "", fmt.Errorf("find the repository: %w", err)
	}
	return strings.TrimSpace(string(dir)), nil
}

// EnterRoot makes the repository the working directory, which paths in arguments are relative to.
func EnterRoot() error {
	dir, err := Root()
	if err != nil {
		return err
	}
	return os.Chdir(dir)
}
