// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"github.com/fairlead/fairlead/internal/config"
)

// Agents with control sockets in one directory keep their state in files of their own. A file
// of an earlier version, which was named by the directory, is taken over once.
func TestStateFileIsOfOneAgent(t *testing.T) {
	dir := t.TempDir()
	named := func(control string) *Agent {
		cfg := config.DefaultAgent()
		cfg.Control = filepath.Join(dir, control)
		return &Agent{cfg: cfg, log: slog.New(slog.DiscardHandler)}
	}
	old := filepath.Join(dir, "docker-owners.json")
	if err := os.WriteFile(old, []byte("earlier"), 0o600); err != nil {
		t.Fatal(err)
	}
	first, second := named("first.sock").stateFile("docker-owners.json"), named("second.sock").stateFile("docker-owners.json")
	if first == second || filepath.Dir(first) != dir || filepath.Dir(second) != dir {
		t.Errorf("the files are %s and %s", first, second)
	}
	if b, err := os.ReadFile(first); string(b) != "earlier" {
		t.Errorf("the first agent has %q, %v", b, err)
	}
	if b, err := os.ReadFile(second); err == nil {
		t.Errorf("the second agent has %q", b)
	}
	// A file that appears later, of an agent of an earlier version, replaces nothing.
	if err := os.WriteFile(old, []byte("later"), 0o600); err != nil {
		t.Fatal(err)
	}
	named("first.sock").stateFile("docker-owners.json")
	if b, err := os.ReadFile(first); string(b) != "earlier" {
		t.Errorf("the first agent has %q, %v", b, err)
	}
}
