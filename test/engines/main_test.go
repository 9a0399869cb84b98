// SPDX-License-Identifier: Apache-2.0

//go:build linux && engines

// Package engines runs the sources of declared ports against real engines:
// Debian's dockerd, containerd with nerdctl and CNI, Podman, and a Kubernetes API server
// with kube-proxy, as hack/provision-engines.sh provides them.
//
// The tests run in an enclave. They need root.
package engines

import (
	"cmp"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/fairlead/fairlead/internal/testkit/leak"
	"github.com/fairlead/fairlead/test/kit/enclave"
	"github.com/fairlead/fairlead/test/kit/program"
)

// nodeAddr is an address of the guest that is not loopback.
const nodeAddr = enclave.NodeAddr

func TestMain(m *testing.M) {
	flag.Parse()
	if flag.Lookup("test.list").Value.String() != "" {
		os.Exit(m.Run())
	}
	if enclave.Dir() != "" {
		if err := enclave.SetUp(); err != nil {
			fmt.Fprintln(os.Stderr, "set up the namespaces:", err)
			os.Exit(1)
		}
		os.Exit(runTests(m))
	}
	code, err := runInside()
	if err != nil {
		fmt.Fprintln(os.Stderr, "run inside namespaces:", err)
		os.Exit(1)
	}
	os.Exit(code)
}

// runTests runs the tests, and also fails if a source left a goroutine behind.
func runTests(m *testing.M) int {
	code := m.Run()
	if err := leak.Find(); code == 0 && err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return code
}

// runInside runs this binary again in new namespaces. Each test has namespaces of its
// own, so that what one leaves in an engine, its state or the kernel harms no other;
// those of Docker run beside the others, as engines spend much of their time waiting.
// Where subtests are chosen, all run in the same namespaces.
func runInside() (int, error) {
	dir, err := os.MkdirTemp("", "fl-engines-")
	if err != nil {
		return 0, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	binary, err := program.Path(dir)
	if err != nil {
		return 0, err
	}
	chosen := flag.Lookup("test.run").Value.String()
	if strings.Contains(chosen, "/") || flag.Lookup("test.skip").Value.String() != "" {
		return inside(binary, os.Stdout)
	}
	lanes, err := tests(cmp.Or(chosen, "."))
	if err != nil {
		return 0, err
	}
	if len(lanes[0])+len(lanes[1]) < 2 { // its output is shown while it runs
		return inside(binary, os.Stdout)
	}
	var (
		wg   sync.WaitGroup
		mu   sync.Mutex // of all below, and of standard output
		code int
		errs []error
	)
	for _, lane := range lanes {
		wg.Go(func() {
			for _, name := range lane {
				// The output of a test is shown when it has ended, in one piece.
				out := filepath.Join(dir, name)
				c, err := insideTo(binary, out, "-test.run=^"+name+"$")
				mu.Lock()
				errs = append(errs, err, show(out))
				code = max(code, c)
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	return code, errors.Join(errs...)
}

// tests lists the tests that match: those of Docker, and the others.
func tests(chosen string) (lanes [2][]string, err error) {
	self, err := os.Executable()
	if err != nil {
		return lanes, err
	}
	out, err := exec.Command(self, "-test.list="+chosen).Output()
	if err != nil {
		return lanes, fmt.Errorf("list the tests: %w", err)
	}
	for _, name := range strings.Fields(string(out)) {
		lane := &lanes[0]
		if strings.Contains(name, "Docker") {
			lane = &lanes[1]
		}
		*lane = append(*lane, name)
	}
	return lanes, nil
}

// insideTo is inside with its output written to a file.
func insideTo(binary, path string, flags ...string) (int, error) {
	f, err := os.Create(path)
	if err != nil {
		return 0, err
	}
	code, err := inside(binary, f, flags...)
	return code, errors.Join(err, f.Close())
}

// show copies a file to standard output.
func show(path string) error {
	b, err := os.ReadFile(path)
	if err == nil {
		_, err = os.Stdout.Write(b)
	}
	return err
}

// inside runs this binary in new namespaces, with flags besides its own.
func inside(binary string, out *os.File, flags ...string) (int, error) {
	self, err := os.Executable()
	if err != nil {
		return 0, err
	}
	cmd := exec.Command(self, slices.Concat(os.Args[1:], flags)...)
	cmd.Env = append(os.Environ(), program.Variable+"="+binary)
	cmd.Stdout, cmd.Stderr = out, out
	err = enclave.Run(cmd)
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return max(1, exit.ExitCode()), nil
	}
	return 0, err
}

// binary is the program under test, built outside.
func binary() string { return os.Getenv(program.Variable) }

// cgroupParent holds every container's cgroup.
func cgroupParent() string { return enclave.CgroupParent() }
