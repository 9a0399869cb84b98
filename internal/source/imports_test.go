// SPDX-License-Identifier: Apache-2.0

// Package source_test checks who links the engines' clients.
package source_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// clients are the module paths of the engines' clients.
var clients = map[string]string{
	"github.com/moby/":       "internal/source/docker",
	"github.com/containerd/": "internal/source/containerd",
	"k8s.io/":                "internal/source/kube",
}

func goList(t *testing.T, env []string, args ...string) []string {
	t.Helper()
	cmd := exec.Command("go", append([]string{"list"}, args...)...)
	cmd.Dir = filepath.Join("..", "..")
	cmd.Env = append(os.Environ(), env...)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list %v: %v: %s", args, err, &stderr)
	}
	return strings.Split(strings.TrimSpace(string(out)), "\n")
}

// The host's side is small: on every system it links none of the clients.
func TestHostLinksNoClient(t *testing.T) {
	if files, err := filepath.Glob("../host/*.go"); err != nil || len(files) == 0 {
		t.Logf("there is no host side yet (%v)", err)
		return
	}
	for _, goos := range []string{"linux", "windows", "darwin"} {
		for _, dep := range goList(t, []string{"GOOS=" + goos, "CGO_ENABLED=0"}, "-deps", "./internal/host") {
			for client := range clients {
				if strings.HasPrefix(dep, client) {
					t.Errorf("on %s, internal/host links %s", goos, dep)
				}
			}
		}
	}
}

// Each client is imported by its one owner.
func TestOneOwnerEach(t *testing.T) {
	for _, line := range goList(t, nil, "-f", `{{.ImportPath}} {{join .Imports " "}}`, "./internal/...", "./cmd/...") {
		pkg, imports, _ := strings.Cut(line, " ")
		for _, imp := range strings.Fields(imports) {
			for client, owner := range clients {
				if !strings.HasPrefix(imp, client) || strings.HasSuffix(pkg, owner) || strings.Contains(pkg, owner+"/") {
					continue
				}
				// Docker's client returns containerd's error values.
				if imp == "github.com/containerd/errdefs" && strings.HasSuffix(pkg, "internal/source/docker") {
					continue
				}
				// The inventory is a client of the API server, too: it writes, where the source reads.
				if owner == "internal/source/kube" && strings.HasSuffix(pkg, "internal/inventory") {
					continue
				}
				t.Errorf("%s imports %s, which is for %s alone", pkg, imp, owner)
			}
		}
	}
}
