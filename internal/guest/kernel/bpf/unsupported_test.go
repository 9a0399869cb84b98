// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// A build for a processor that the agent does not work on fails with one clear line. The two
// files import nothing, so apart from the others they are compiled at once.
func TestOtherProcessorsAreRefused(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "go.mod"), []byte("module bpf\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"doc.go", "unsupported.go"} {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for target, refused := range map[string]bool{
		"linux/amd64": false, "linux/arm64": false, "linux/riscv64": false, "linux/ppc64le": false, "windows/386": false,
		"linux/386": true, "linux/arm": true, "linux/mipsle": true, "linux/s390x": true, "linux/ppc64": true, "linux/mips64": true,
	} {
		system, arch, _ := strings.Cut(target, "/")
		cmd := exec.Command("go", "build", ".")
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS="+system, "GOARCH="+arch)
		out, err := cmd.CombinedOutput()
		lines := strings.Split(strings.TrimSpace(string(out)), "\n")
		if !refused && err != nil || refused && (err == nil || len(lines) != 2 || !strings.Contains(lines[1], "needs_a_64_bit_little_endian_processor")) {
			t.Errorf("%s: %v\n%s", target, err, out)
		}
	}
}
