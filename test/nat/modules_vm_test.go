// SPDX-License-Identifier: Apache-2.0

//go:build linux && vm

package nat

import (
	"bytes"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/guest/source/nat"
	"github.com/fairlead/fairlead/internal/testkit/kernels"
)

// unload takes nf_tables out of the kernel with all that needs it. Only a kernel in which
// nothing has used it lets it go for certain: the machine runs TestFresh… first.
func unload(t *testing.T) {
	t.Helper()
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		b, err := os.ReadFile("/proc/modules")
		if err != nil {
			t.Fatal(err)
		}
		left := false
		for line := range strings.Lines(string(b)) {
			name, _, _ := strings.Cut(line, " ")
			if strings.HasPrefix(name, "nft_") || name == "nf_tables" {
				left = true
				_ = exec.Command("/bin/busybox", "rmmod", name).Run() // one that others need goes the next time
			}
		}
		if !left {
			return
		}
	}
	b, _ := os.ReadFile("/proc/modules")
	t.Fatalf("nf_tables stays:\n%s", bytes.TrimSpace(b))
}

// A source that starts before nf_tables is there has it loaded by its own question for the
// ruleset, and follows it, filtered.
func TestFreshKernelIsFollowedAfterModuleLoad(t *testing.T) {
	builtIn, err := kernels.BuiltIn("nf_tables")
	if err != nil {
		t.Fatal(err)
	}
	if !builtIn { // as in WSL
		unload(t)
	}
	w := newWorld(t)
	src, f, _ := w.start(nat.Options{Filter: w.filter()})
	eventually(t, "a first set", f.ready)
	w.run(pre, "nft", "-f", "-")
	w.run("add rule ip t pre tcp dport 80 dnat to 10.0.0.1", "nft", "-f", "-")
	expect(t, f, "a rule", "tcp 0.0.0.0:80 [ip t] 10.0.0.1:80")
	if st := src.Status(); st.Drift != 0 || st.Lost != 0 || !strings.HasPrefix(f.methodNow(), nat.MethodNetlink) {
		t.Errorf("drift %d, lost %d, method %q", st.Drift, st.Lost, f.methodNow())
	}
}
