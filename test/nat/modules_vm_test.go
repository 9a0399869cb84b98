// SPDX-License-Identifier: Apache-2.0

//go:build linux && vm

package nat

import (
	"bytes"
	"context"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/source/nat"
	"github.com/fairlead/fairlead/internal/source/nat/hook"
	"github.com/fairlead/fairlead/internal/source/nat/watch"
	"github.com/fairlead/fairlead/test/kit/kernels"
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

// A source that prefers hooks and starts before nf_tables is there takes them when it has
// been loaded, here by the source's own question for the ruleset. Where nf_tables is built
// in, as in WSL, it takes them at once.
func TestFreshKernelHooksUsedAfterModuleLoad(t *testing.T) {
	best := kernels.Best(nat.MethodFentry, nat.MethodKprobe)
	builtIn, err := kernels.BuiltIn("nf_tables")
	if err != nil {
		t.Fatal(err)
	}
	if !builtIn {
		unload(t)
	}
	modules, err := hook.OpenModules(nil)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- modules.Run(ctx) }()
	defer func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}()
	w := newWorld(t)
	l := w.legacyHook()
	l.modules = modules.Loaded()
	k, err := watch.Open(slog.New(slog.DiscardHandler), w.path(), nil, 8<<20)
	if err != nil {
		t.Fatal(err)
	}
	defer k.Close()
	if s, err := k.Watch(best); (err == nil) != builtIn {
		t.Fatalf("nf_tables is built in: %v; the hooks: %v", builtIn, err)
	} else if err == nil {
		_ = s.Close()
	}
	src, f, _ := w.start(nat.Options{Wake: l, Methods: []string{nat.MethodFentry, nat.MethodKprobe, nat.MethodNetlink, nat.MethodGeneration}})
	eventually(t, "a first set", f.ready)
	eventually(t, "the hooks", func() bool { return strings.HasPrefix(f.methodNow(), best) })
	w.run(pre, "nft", "-f", "-")
	w.run("add rule ip t pre tcp dport 80 dnat to 10.0.0.1", "nft", "-f", "-")
	expect(t, f, "a rule", "tcp 0.0.0.0:80 [ip t] 10.0.0.1:80")
	if st := src.Status(); st.Drift != 0 {
		t.Errorf("drift %d", st.Drift)
	}
}
