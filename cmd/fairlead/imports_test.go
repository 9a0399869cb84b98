// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"os/exec"
	"strings"
	"testing"
)

// clients are the modules that only the guest agent needs.
var clients = []string{
	"github.com/cilium/ebpf", "github.com/containerd/", "github.com/docker/", "github.com/moby/",
	"github.com/google/nftables", "google.golang.org/grpc", "k8s.io/", "sigs.k8s.io/",
	"github.com/fairlead/fairlead/internal/guest/agent", "github.com/fairlead/fairlead/internal/guest/kernel",
	"github.com/fairlead/fairlead/internal/guest/observer",
	"github.com/fairlead/fairlead/internal/guest/source/",
}

// linked returns what a program needs on a system, of what only the agent may.
func linked(t *testing.T, system, program string) []string {
	t.Helper()
	cmd := exec.Command("go", "list", "-deps", program)
	cmd.Env = append(os.Environ(), "GOOS="+system, "GOARCH=amd64", "CGO_ENABLED=0")
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list for %s: %v", system, err)
	}
	var found []string
	for dep := range strings.Lines(string(out)) {
		for _, c := range clients {
			if strings.HasPrefix(dep, c) {
				found = append(found, strings.TrimSpace(dep))
			}
		}
	}
	return found
}

func TestHostPeerLinksNoClientOfTheAgent(t *testing.T) {
	const module = "github.com/fairlead/fairlead/"
	for _, c := range []struct{ system, program string }{
		{"windows", module + "cmd/fairlead"},
		{"darwin", module + "cmd/fairlead"},
		{"linux", module + "internal/host/hostpeer"},
		{"linux", module + "cmd/fairlead-run"},
	} {
		if found := linked(t, c.system, c.program); len(found) > 0 {
			t.Errorf("on %s, %s links %q", c.system, c.program, found)
		}
	}
	// And the list above is not of names that nobody has.
	if found := linked(t, "linux", module+"cmd/fairlead"); len(found) < len(clients) {
		t.Errorf("on linux, the agent links only %q", found)
	}
}

// A program that can look up any method by name keeps all methods of all types, which the
// linker leaves out otherwise.
func TestLinkerLeavesOutUnusedMethods(t *testing.T) {
	cmd := exec.Command("go", "build", "-tags", "grpcnotrace", "-ldflags", "-s -w -dumpdep", "-o", os.DevNull, ".")
	cmd.Env = append(os.Environ(), "GOOS=linux", "CGO_ENABLED=0")
	out, err := cmd.CombinedOutput() // lines of "caller <flags> -> callee"
	if err != nil {
		t.Fatalf("go build: %v: %.1000s", err, out)
	}
	found := map[string]bool{}
	lines := 0
	for line := range strings.Lines(string(out)) {
		lines++
		caller, _, _ := strings.Cut(line, " -> ")
		if name, ok := strings.CutSuffix(caller, " <ReflectMethod>"); ok && !found[name] {
			found[name] = true
			t.Errorf("%s looks up methods by name", name)
		}
	}
	if lines < 10_000 {
		t.Errorf("the linker reported %d lines", lines)
	}
}
