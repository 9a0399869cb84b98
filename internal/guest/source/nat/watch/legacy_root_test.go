// SPDX-License-Identifier: Apache-2.0

//go:build linux && (root || vm)

package watch

import (
	"context"
	"fmt"
	"os/exec"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/guest/kernel"
	"github.com/fairlead/fairlead/internal/testkit/kernels"
	"github.com/fairlead/fairlead/internal/testkit/netns"
	"github.com/fairlead/fairlead/internal/testkit/wait"
)

// guest returns a network namespace, its path, and what runs a command in it.
func guest(t *testing.T) (path string, run func(line string)) {
	t.Helper()
	s, err := netns.New()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return fmt.Sprintf("/proc/self/fd/%d", s.FD()), func(line string) {
		t.Helper()
		args := strings.Fields(line)
		cmd := exec.Command(args[0], args[1:]...)
		var out strings.Builder
		cmd.Stdout, cmd.Stderr = &out, &out
		if err := s.Start(cmd); err != nil {
			t.Fatal(err)
		}
		if err := cmd.Wait(); err != nil {
			t.Fatalf("%s: %v\n%s", line, err, out.String())
		}
	}
}

func TestLegacy(t *testing.T) {
	for _, method := range []string{kernel.MethodFentry, kernel.MethodKprobe, kernel.MethodTracepoint} {
		t.Run(method, func(t *testing.T) {
			path, run := guest(t)
			run("iptables-legacy -w -t nat -N BEFORE") // loads the module
			l, err := OpenLegacy(LegacyOptions{NetNS: path, Methods: []string{method}})
			if err != nil && method != kernel.MethodTracepoint && !kernels.Must(method) {
				t.Logf("this kernel does not take the method: %v", err)
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if l.Method() != method {
				t.Errorf("method %s", l.Method())
			}
			ctx, cancel := context.WithCancel(context.Background())
			done := make(chan error, 1)
			go func() { done <- l.Run(ctx) }()
			run("iptables-legacy -w -t nat -N AFTER")
			wait.For(t, "a replacement", l.LegacyChanged())
			cancel()
			if err := wait.For(t, "the end", done); err != nil {
				t.Error(err)
			}
			for range l.LegacyChanged() { // Run closed it
			}
		})
	}
}
